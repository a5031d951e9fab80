"""A report on the terminal, by Rich."""

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from dflash_tools.report.document import Chart, Report, Section, Table, single_figures
from dflash_tools.report.format import format_value, heading

MAX_ROWS = 24
_GAP = 2
_TICKS = "▁▂▃▄▅▆▇█"


def print_report(report: Report, console: Console | None = None) -> None:
    """Print figures, diagnosis, tables, and a sparkline for every line chart.

    Args:
        report: What to print.
        console: Where to; default standard output, as wide as its longest table where that is no terminal.
    """
    out = console if console is not None else _standard_console()
    out.print(Text(report.title, style="bold"), Text(report.subject, style="dim"))
    out.print(_figures(report))
    if report.diagnosis:
        lines = Text("\n").join(Text(f"• {sentence}") for sentence in report.diagnosis)
        out.print(Panel(lines, title="What stands out", title_align="left", border_style="yellow"))
    for section in report.sections:
        _print_section(section, out)
    for note in report.notes:
        out.print(Text(f"note: {note}", style="dim"))


def _standard_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _figures(report: Report) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for name, value in single_figures(report.figures).items():
        grid.add_row(Text(heading(name), style="dim"), format_value(name, value))
    return grid


def _print_section(section: Section, out: Console) -> None:
    visible = [part for part in section.parts if _is_printed(part)]
    if not visible and not section.text:
        return
    out.print()
    out.rule(Text(section.title, style="bold"), align="left", style="dim")
    if section.text:
        out.print(Text(section.text, style="dim"))
    for part in visible:
        if isinstance(part, Table):
            _print_table(part, out)
        else:
            out.print(Padding(sparkline_of(part), (0, 0, 0, 1)))


def _is_printed(part: Table | Chart) -> bool:
    return part.shown if isinstance(part, Table) else part.kind == "line"


def _print_table(table: Table, out: Console) -> None:
    columns = [(name, dtype.is_numeric()) for name, dtype in table.frame.schema.items()]
    rows = [
        [format_value(name, value) for name, value in row.items()]
        for row in table.frame.head(MAX_ROWS).iter_rows(named=True)
    ]
    values = [max((len(row[place]) for row in rows), default=0) for place in range(len(columns))]
    # A heading may wrap between words and a text anywhere; a number never does.
    narrow = [
        min(max([values[place] if numeric else 0, *(len(word) for word in heading(name).split())]), out.width - _GAP)
        for place, (name, numeric) in enumerate(columns)
    ]
    wide = [max(values[place], len(heading(name))) for place, (name, _) in enumerate(columns)]
    out.print(Text(table.title, style="italic"))
    for places in _pieces(narrow, out.width):
        grid = Grid(header_style="bold", box=None, padding=(0, _GAP, 0, 0))
        spare = max(0, out.width - sum(narrow[place] + _GAP for place in places))
        wish = max(1, sum(max(0, wide[place] - narrow[place]) for place in places))
        for place in places:
            extra = max(0, wide[place] - narrow[place]) * min(spare, wish) // wish
            name, numeric = columns[place]
            grid.add_column(
                heading(name), justify="right" if numeric else "left", width=narrow[place] + extra, overflow="fold"
            )
        for row in rows:
            grid.add_row(*(Text(row[place]) for place in places))
        out.print(grid)
    if table.note:
        out.print(Text(table.note, style="dim"))
    if len(table.frame) > MAX_ROWS:
        out.print(Text(f"first {MAX_ROWS} of {len(table.frame):,} rows; --out DIR writes all", style="dim"))


def _pieces(widths: list[int], room: int) -> list[list[int]]:
    """Cut a table that is too wide into several, each led by its first column, so that no number is ever cut."""
    pieces = [[0]]
    used = widths[0] + _GAP
    for place, width in enumerate(widths[1:], start=1):
        if used + width + _GAP > room and len(pieces[-1]) > 1:
            pieces.append([0])
            used = widths[0] + _GAP
        pieces[-1].append(place)
        used += width + _GAP
    return pieces


def sparkline_of(chart: Chart, width: int = 60) -> Text:
    """A line chart as one row of ticks per series, with its first, lowest, highest and last value."""
    text = Text(chart.title, style="italic")
    series = chart.frame.partition_by(chart.color, maintain_order=True) if chart.color else [chart.frame]
    label_width = max(len(_series_name(chart, one)) for one in series)
    for one in series:
        values = one.get_column(chart.y).cast(pl.Float64).drop_nulls().drop_nans().to_numpy()
        if len(values):
            figures = ", ".join(
                f"{word} {format_value(chart.y, float(value))}"
                for word, value in (
                    ("first", values[0]),
                    ("lowest", values.min()),
                    ("highest", values.max()),
                    ("last", values[-1]),
                )
            )
            text.append(
                f"\n{_series_name(chart, one):<{label_width}} {sparkline(values, width)} {figures}", style="not italic"
            )
    return text


def _series_name(chart: Chart, series: pl.DataFrame) -> str:
    return str(series.get_column(chart.color)[0]) if chart.color else ""


def sparkline(values: NDArray[np.float64], width: int) -> str:
    """Means of ``width`` equal stretches as ticks from the lowest to the highest.

    Args:
        values: Finite values, at least one. Shape: (num_values,).
        width: Most ticks.
    """
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, high = float(means.min()), float(means.max())
    scaled = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join(_TICKS[round(value * (len(_TICKS) - 1))] for value in scaled)
