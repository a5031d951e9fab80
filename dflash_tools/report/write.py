"""A report as files: report.html, report.md, tables/*.parquet."""

from pathlib import Path

from dflash_tools.report.document import Chart, Report, Table
from dflash_tools.report.markdown import to_markdown


def write_report(report: Report, out: Path) -> None:
    """Write ``report.html`` (opens offline), ``report.md`` and every table and chart's rows as Parquet.

    Args:
        report: What to write.
        out: Folder; made if missing. Files of an earlier report there are replaced.
    """
    # Altair takes longer to import than a report takes to compute.
    from dflash_tools.report.html import to_html

    tables = out / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(to_html(report), encoding="utf-8")
    (out / "report.md").write_text(to_markdown(report), encoding="utf-8")
    parts: tuple[Table | Chart, ...] = (*report.tables, *report.charts)
    for part in parts:
        part.frame.write_parquet(tables / f"{part.name}.parquet")
