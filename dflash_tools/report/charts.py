"""Charts as Vega-Lite specifications, by Altair; ink is ``currentColor``: one picture for light, dark and print."""

from collections.abc import Callable, Mapping
from typing import Any

import altair as alt
import polars as pl

from dflash_tools.report.columns import largest_of
from dflash_tools.report.document import Chart, ChartKind
from dflash_tools.report.format import is_share

# Middle tones, told apart by people with colour-blindness and readable on white and on near-black.
PALETTE = ("#3f8fd2", "#e0813a", "#2fa37c", "#c264c9", "#c8a11a", "#dd5b74", "#7d8ba1", "#7f6be0", "#4bb5c1", "#a0763f")
INK = "currentColor"
_HEIGHT = 240

_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "tickColor": INK,
        "domainColor": INK,
        "gridColor": INK,
        "gridOpacity": 0.12,
        "domainOpacity": 0.5,
        "tickOpacity": 0.5,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 280,
    },
    "range": {"category": list(PALETTE)},
}


def chart_spec(chart: Chart) -> dict[str, Any]:
    """Turn a chart into a Vega-Lite specification with its rows inlined.

    Raises:
        KeyError: If the frame lacks a column the chart names.
    """
    base = alt.Chart(alt.InlineData(values=[]))
    drawn = _DRAWERS[chart.kind](base, chart)
    sized = drawn.properties(
        width="container", height=_height(chart), description=f"{chart.title}. {chart.description}"
    )
    spec: dict[str, Any] = sized.to_dict()
    # Put in last: Altair would check every row against its schema.
    spec["data"] = {"values": _rows(chart)}
    spec["config"] = _CONFIG
    return spec


def _rows(chart: Chart) -> list[dict[str, Any]]:
    floats = [name for name, dtype in chart.frame.schema.items() if dtype.is_float()]
    # JSON has no NaN: such a value becomes null and is not drawn.
    return chart.frame.with_columns(pl.col(name).fill_nan(None).round_sig_figs(6) for name in floats).to_dicts()


def _height(chart: Chart) -> int:
    return max(120, 34 * chart.frame.get_column(chart.y).n_unique()) if chart.kind == "heatmap" else _HEIGHT


def _axis(chart: Chart, column: str, channel: Any, **options: Any) -> Any:
    dtype = chart.frame.schema[column]
    if dtype.is_numeric():
        axis: dict[str, Any] = (
            {"format": ".0%"} if is_share(column) else {"format": ",~s"} if dtype.is_integer() else {}
        )
        return channel(column, type="quantitative", title=chart.title_of(column), axis=alt.Axis(**axis), **options)
    return channel(
        column, type="nominal", title=chart.title_of(column), sort=None, axis=alt.Axis(labelAngle=0), **options
    )


def _color(chart: Chart) -> Mapping[str, Any]:
    if not chart.color:
        return {"color": alt.value(PALETTE[0])}
    order = chart.frame.get_column(chart.color).unique(maintain_order=True).to_list()
    scale = alt.Scale(domain=order, range=[PALETTE[place % len(PALETTE)] for place in range(len(order))])
    return {"color": alt.Color(chart.color, type="nominal", sort=None, scale=scale, title=chart.title_of(chart.color))}


def _tooltip(chart: Chart) -> list[alt.Tooltip]:
    tips = []
    for column in dict.fromkeys(filter(None, (chart.color, chart.x, chart.y))):
        numeric = chart.frame.schema[column].is_numeric()
        form: dict[str, Any] = {"format": ".1%" if is_share(column) else ",.6~g"} if numeric else {}
        tips.append(
            alt.Tooltip(column, type="quantitative" if numeric else "nominal", title=chart.title_of(column), **form)
        )
    return tips


def _pick_by_legend(drawn: Any, chart: Chart, opacity: float) -> Any:
    """Let a click on the legend bring one series forward."""
    if not chart.color:
        return drawn.encode(opacity=alt.value(opacity))
    pick = alt.selection_point(fields=[chart.color], bind="legend", name="pick")
    return drawn.add_params(pick).encode(opacity=alt.condition(pick, alt.value(opacity), alt.value(0.06)))


def _draw_bars(base: Any, chart: Chart) -> Any:
    offset = {"xOffset": alt.XOffset(chart.color, type="nominal", sort=None)} if chart.color else {}
    x = alt.X(chart.x, type="ordinal", sort=None, title=chart.title_of(chart.x), axis=alt.Axis(labelAngle=0))
    if chart.log_y:
        # Symlog, unlike log, has a place for zero and for bars of one.
        ticks = [0, *(10**power for power in range(10) if 10**power <= largest_of(chart.frame, chart.y))]
        axis, scale = alt.Axis(values=ticks, format=",~s"), alt.Scale(type="symlog")
        y = alt.Y(chart.y, type="quantitative", title=chart.title_of(chart.y), stack=None, axis=axis, scale=scale)
    else:
        y = _axis(chart, chart.y, alt.Y, stack=None)
    return base.mark_bar().encode(x=x, y=y, tooltip=_tooltip(chart), **offset, **_color(chart))


def _draw_stack(base: Any, chart: Chart) -> Any:
    x = alt.X(chart.x, type="ordinal", sort=None, title=chart.title_of(chart.x), axis=alt.Axis(labelAngle=0))
    y = _axis(chart, chart.y, alt.Y, stack="zero")
    return base.mark_bar().encode(x=x, y=y, tooltip=_tooltip(chart), **_color(chart))


def _scale(chart: Chart) -> alt.Scale:
    return alt.Scale(type="log", nice=False) if chart.log_y else alt.Scale(zero=False)


# Hundreds of points read aloud help nobody: the chart's description and its table do, so marks of curves are silent.
def _draw_line(base: Any, chart: Chart) -> Any:
    drawn = base.mark_line(strokeWidth=1.6, point=len(chart.frame) < 40, aria=False).encode(
        x=_axis(chart, chart.x, alt.X),
        y=_axis(chart, chart.y, alt.Y, scale=_scale(chart)),
        tooltip=_tooltip(chart),
        **_color(chart),
    )
    return _pick_by_legend(drawn, chart, 1.0)


def _draw_points(base: Any, chart: Chart) -> Any:
    drawn = base.mark_circle(size=18, aria=False).encode(
        x=_axis(chart, chart.x, alt.X),
        y=_axis(chart, chart.y, alt.Y, scale=_scale(chart)),
        tooltip=_tooltip(chart),
        **_color(chart),
    )
    return _pick_by_legend(drawn, chart, 0.7)


def _draw_ranges(base: Any, chart: Chart) -> Any:
    x = alt.X(chart.x, type="ordinal", sort=None, title=chart.title_of(chart.x), axis=alt.Axis(labelAngle=0))
    scale = _scale(chart)
    axis = alt.Axis(format=".0%") if is_share(chart.y) else alt.Axis()
    bars = base.mark_bar(size=14, opacity=0.45, color=PALETTE[0]).encode(
        x=x, y=alt.Y("low", type="quantitative", title=chart.title_of(chart.y), scale=scale, axis=axis), y2="high"
    )
    marks = base.mark_tick(size=22, thickness=3, color=PALETTE[1]).encode(
        x=x, y=alt.Y(chart.y, type="quantitative", scale=scale, axis=axis), tooltip=_tooltip(chart)
    )
    return bars + marks


def _draw_heatmap(base: Any, chart: Chart) -> Any:
    x = alt.X(chart.x, type="ordinal", sort=None, title=chart.title_of(chart.x), axis=alt.Axis(labelAngle=0))
    y = alt.Y(chart.y, type="ordinal", sort=None, title=chart.title_of(chart.y))
    # One hue whose opacity carries the value works on any background.
    cells = base.mark_rect(color=PALETTE[0], stroke=INK, strokeOpacity=0.15).encode(
        x=x,
        y=y,
        opacity=alt.Opacity(
            chart.color, type="quantitative", scale=alt.Scale(domain=[0, 1], range=[0, 0.85]), legend=None
        ),
    )
    labels = base.mark_text(color=INK, fontSize=12).encode(
        x=x, y=y, text=alt.Text(chart.color, type="quantitative", format=".0%"), tooltip=[*_tooltip(chart)]
    )
    return cells + labels


_DRAWERS: Mapping[ChartKind, Callable[[Any, Chart], Any]] = {
    "bars": _draw_bars,
    "stack": _draw_stack,
    "line": _draw_line,
    "points": _draw_points,
    "ranges": _draw_ranges,
    "heatmap": _draw_heatmap,
}
