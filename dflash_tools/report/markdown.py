"""A report as Markdown: the same sentences, figures and tables, without charts."""

import polars as pl

from dflash_tools.report.document import Report, Table, single_figures
from dflash_tools.report.format import format_value, heading

MAX_ROWS = 200


def to_markdown(report: Report) -> str:
    """Write the report as GitHub-flavoured Markdown."""
    lines = [f"# {report.title}", "", escape(report.subject), ""]
    if report.diagnosis:
        lines += ["## What stands out", "", *(f"- {escape(sentence)}" for sentence in report.diagnosis), ""]
    figures = single_figures(report.figures)
    lines += ["| figure | value |", "|---|--:|"]
    lines += [f"| {heading(name)} | {escape(format_value(name, value))} |" for name, value in figures.items()]
    for section in report.sections:
        tables = [part for part in section.parts if isinstance(part, Table) and part.shown]
        if tables or section.text:
            lines += ["", f"## {section.title}", "", escape(section.text)]
        for table in tables:
            lines += ["", f"**{escape(table.title)}**", "", *_rows(table.frame)]
            if table.note:
                lines += ["", escape(table.note)]
            if len(table.frame) > MAX_ROWS:
                lines += ["", f"First {MAX_ROWS} of {len(table.frame):,} rows; all in `tables/{table.name}.parquet`."]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {escape(note)}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _rows(frame: pl.DataFrame) -> list[str]:
    header = "| " + " | ".join(heading(column) for column in frame.columns) + " |"
    rule = "|" + "|".join("--:" if dtype.is_numeric() else "---" for dtype in frame.dtypes) + "|"
    body = [
        "| " + " | ".join(escape(format_value(column, value)) for column, value in row.items()) + " |"
        for row in frame.head(MAX_ROWS).iter_rows(named=True)
    ]
    return [header, rule, *body]


def escape(text: str) -> str:
    """Keep text from being read as Markdown or HTML."""
    for mark, safe in (
        ("\\", "\\\\"),
        ("&", "&amp;"),
        ("<", "&lt;"),
        ("|", "\\|"),
        ("*", "\\*"),
        ("_", "\\_"),
        ("`", "\\`"),
    ):
        text = text.replace(mark, safe)
    return text
