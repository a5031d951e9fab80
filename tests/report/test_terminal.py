import io

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dflash_tools.report import print_report, report_plan, report_run
from dflash_tools.report.document import Report, Section, Table
from dflash_tools.report.terminal import sparkline


def printed(report, width=120) -> str:
    file = io.StringIO()
    print_report(report, Console(file=file, width=width))
    return file.getvalue()


def test_figures_diagnosis_tables_and_curves_are_printed(run):
    text = printed(report_run(run))
    for words in ("padding efficiency", "Loss over steps", "Runs of equal buckets", "held out loss last", "█"):
        assert words in text


@pytest.mark.parametrize("width", [40, 80, 97, 110, 118, 160])
def test_numbers_are_never_cut_however_narrow_the_terminal(store, config, width):
    report = report_plan(config, [store])
    text = printed(report, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    for value in report.table("buckets").get_column("padding_efficiency"):
        assert f"{100 * value:.1f} %" in text


def test_a_long_table_says_how_many_rows_it_has():
    table = Table(name="t", title="Many", frame=pl.DataFrame({"n": range(1000)}))
    report = Report(kind="plan", title="t", subject="s", figures={}, sections=(Section(title="x", parts=(table,)),))
    assert "first 24 of 1,000 rows" in printed(report)


def test_brackets_in_names_are_no_markup():
    table = Table(name="t", title="[red]", frame=pl.DataFrame({"name": ["[bold]x[/bold]"]}))
    report = Report(kind="plan", title="t", subject="[i]", figures={}, sections=(Section(title="[b]", parts=(table,)),))
    text = printed(report)
    assert "[bold]x[/bold]" in text
    assert "[red]" in text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(1, 80))
def test_a_sparkline_has_at_most_its_width_and_reaches_top_and_bottom(values, width):
    ticks = sparkline(np.array(values), width)
    assert len(ticks) == min(width, len(values))
    assert "▁" in ticks
