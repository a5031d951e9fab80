import json

import polars as pl
import pytest

from dflash_tools.report.document import Report, Section, Table


def test_a_report_refuses_more_sentences_than_a_person_reads():
    with pytest.raises(ValueError, match="at most 7"):
        Report(kind="plan", title="t", subject="s", figures={}, diagnosis=("x",) * 8)


def test_a_report_refuses_two_tables_of_one_name():
    table = Table(name="twice", title="t", frame=pl.DataFrame({"a": [1]}))
    with pytest.raises(ValueError, match="repeat"):
        Report(kind="plan", title="t", subject="s", figures={}, sections=(Section(title="x", parts=(table, table)),))


def test_the_json_form_holds_figures_diagnosis_and_the_rows_of_shown_tables():
    shown = Table(name="shown", title="t", frame=pl.DataFrame({"a": [1, 2]}))
    hidden = Table(name="hidden", title="t", frame=pl.DataFrame({"a": [1]}), shown=False)
    report = Report(
        kind="plan",
        title="t",
        subject="s",
        figures={"padding_efficiency": 0.5},
        diagnosis=("one",),
        sections=(Section(title="x", parts=(shown, hidden)),),
    )
    assert json.loads(json.dumps(report.to_dict())) == {
        "kind": "plan",
        "subject": "s",
        "padding_efficiency": 0.5,
        "diagnosis": ["one"],
        "notes": [],
        "tables": {"shown": [{"a": 1}, {"a": 2}]},
    }
