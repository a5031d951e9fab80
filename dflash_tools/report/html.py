"""A report as one HTML file that opens offline: scripts, styles and rows are all inside."""

import json
from functools import cache
from typing import Any

import altair as alt
import polars as pl
import vl_convert
from jinja2 import Environment, PackageLoader

from dflash_tools.report.charts import chart_spec
from dflash_tools.report.document import Chart, Report, Table, single_figures
from dflash_tools.report.format import format_value, heading

MAX_ROWS = 500


def to_html(report: Report) -> str:
    """Write the report as a page.

    Charts are drawn by Vega, whose code is part of the page; beside each stands its table, so the page also reads
    without scripts, aloud, and on paper. The page's own policy forbids every network request.
    """
    environment = Environment(
        loader=PackageLoader("dflash_tools.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    figures = single_figures(report.figures)
    page: str = environment.get_template("page.html.jinja").render(
        report=report,
        figures=[(heading(name), format_value(name, value)) for name, value in figures.items()],
        sections=[
            {
                "title": section.title,
                "text": section.text,
                "parts": [_view(part) for part in section.parts if _is_shown(part)],
            }
            for section in report.sections
        ],
        specs=_inline_json({chart.name: chart_spec(chart) for chart in report.charts}),
        vega=_vega_bundle() if report.charts else "",
    )
    return page


@cache
def _vega_bundle() -> str:
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=f"v{version}")
    return bundle.replace("</script", "<\\/script")


def _inline_json(value: Any) -> str:
    # "<" never stands as itself, so no text of a user can end the script element.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _is_shown(part: Table | Chart) -> bool:
    return not isinstance(part, Table) or part.shown


def _view(part: Table | Chart) -> dict[str, Any]:
    view: dict[str, Any] = {"name": part.name, "title": part.title, **_grid(part.frame)}
    if isinstance(part, Chart):
        return {**view, "is_chart": True, "note": part.description}
    return {**view, "is_chart": False, "note": part.note}


def _grid(frame: pl.DataFrame) -> dict[str, Any]:
    return {
        "columns": [(heading(name), dtype.is_numeric()) for name, dtype in frame.schema.items()],
        "rows": [
            [(format_value(name, value), frame.schema[name].is_numeric()) for name, value in row.items()]
            for row in frame.head(MAX_ROWS).iter_rows(named=True)
        ],
        "num_rows": len(frame),
        "max_rows": MAX_ROWS,
    }
