import polars as pl

from dflash_tools.report import report_plan, write_report


def test_a_report_is_written_as_page_markdown_and_tables(tmp_path, store, config):
    report = report_plan(config, [store])
    write_report(report, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!DOCTYPE html>")
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert markdown.startswith("# Plan of a run\n")
    assert "| bucket id | min tokens |" in markdown
    names = {path.stem for path in (tmp_path / "out" / "tables").glob("*.parquet")}
    assert names == {part.name for part in (*report.tables, *report.charts)}
    assert pl.read_parquet(tmp_path / "out" / "tables" / "batches.parquet").equals(report.table("batches"))


def test_markdown_escapes_what_would_be_markup(tmp_path, store, config):
    from dflash_tools.report.markdown import escape

    assert escape("a|b *c* <d> `e`") == "a\\|b \\*c\\* &lt;d> \\`e\\`"
