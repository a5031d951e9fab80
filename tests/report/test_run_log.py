import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report.made import evaluation_record, step_records

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.run_folder import EVALUATION_FILE, LOG_FILE
from dflash_tools.errors import ResumeError
from dflash_tools.report import run_log
from dflash_tools.report.composition import frame_of_plan
from dflash_tools.report.run_log import read_run_log


@pytest.fixture(scope="module")
def records():
    from report.test_composition import plan_of_batches, samples_of

    number = 12
    plan = plan_of_batches([[i] for i in range(number)], np.arange(number) % 3)
    batches = frame_of_plan(plan, samples_of(np.arange(10, 10 + number), np.arange(number) % 3))
    return step_records(batches, TrainConfig(), np.zeros(number))


def write(folder, records):
    (folder / LOG_FILE).write_text("".join(record.model_dump_json() + "\n" for record in records))


def test_every_field_of_a_record_is_a_column(tmp_path, records):
    write(tmp_path, records)
    log = read_run_log(tmp_path)
    assert log.notes == ()
    for row, record in zip(log.steps.iter_rows(named=True), records, strict=True):
        expected = json.loads(record.model_dump_json())
        del expected["batches"]
        assert row == expected
    for row, record in zip(log.batches.iter_rows(named=True), records, strict=True):
        assert {key: row[key] for key in json.loads(record.batches[0].model_dump_json())} == json.loads(
            record.batches[0].model_dump_json()
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(cut=st.integers(0, 10_000))
def test_a_log_cut_anywhere_gives_its_whole_lines_and_a_note(tmp_path, records, cut):
    """LG-07: the last line may be half written while the run goes on."""
    content = "".join(record.model_dump_json() + "\n" for record in records).encode()
    part = content[: min(cut, len(content))]
    (tmp_path / LOG_FILE).write_bytes(part)
    log = read_run_log(tmp_path)
    assert log.steps.get_column("step").to_list() == list(range(part.count(b"\n")))
    assert len(log.notes) == (0 if part.endswith(b"\n") or not part else 1)


def test_reading_leaves_the_run_as_it_is(tmp_path, records):
    """LG-07: a report is read-only."""
    write(tmp_path, records)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read_run_log(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_resumed_run_has_one_record_a_step_and_none_of_the_abandoned_ones(tmp_path, records):
    """LG-01: run to 11, resume from 6, look at it at step 8: steps 9 to 11 were trained on weights that are gone."""
    again = [record.model_copy(update={"attempt": 2, "loss": 9.0}) for record in records[6:9]]
    write(tmp_path, [*records, *again])
    log = read_run_log(tmp_path)
    assert log.steps.get_column("step").to_list() == list(range(9))
    assert log.steps.get_column("attempt").to_list() == [1] * 6 + [2] * 3
    assert log.steps.get_column("loss").to_list()[6:] == [9.0] * 3
    assert log.batches.get_column("batch").to_list() == list(range(9))
    assert log.notes == ("6 records of steps that a later attempt did again were left out",)


@given(starts=st.lists(st.integers(0, 11), min_size=0, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_after_any_number_of_resumes_every_step_comes_once_from_its_newest_attempt(tmp_path, records, starts):
    """LG-02: several attempts write into one log."""
    lines, newest = list(records), {record.step: 1 for record in records}
    for attempt, start in enumerate(starts, start=2):
        again = [record.model_copy(update={"attempt": attempt}) for record in records[start:]]
        lines += again
        newest |= {record.step: attempt for record in again}
    write(tmp_path, lines)
    steps = read_run_log(tmp_path).steps
    assert dict(zip(steps["step"].to_list(), steps["attempt"].to_list(), strict=True)) == newest


def test_a_loss_that_is_no_number_reads_as_nan(tmp_path, records):
    broken = records[3].model_copy(update={"loss": float("nan"), "grad_norm": float("inf"), "skipped": True})
    write(tmp_path, [*records[:3], broken])
    steps = read_run_log(tmp_path).steps
    assert np.isnan(steps["loss"][3])
    assert steps["skipped"].to_list() == [False, False, False, True]


def test_a_damaged_line_in_the_middle_is_left_out_with_its_number(tmp_path, records):
    lines = [record.model_dump_json() for record in records]
    lines[4] = lines[4][:50]
    (tmp_path / LOG_FILE).write_text("\n".join(lines) + "\n")
    log = read_run_log(tmp_path)
    assert log.steps.get_column("step").to_list() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert log.notes == ("log.jsonl: lines that are no whole records were left out: 1 (line 5)",)


@pytest.mark.parametrize("block_bytes", [1, 700, 1500, 10**6])
def test_a_log_read_in_blocks_is_the_same_log(tmp_path, records, monkeypatch, block_bytes):
    """LG-08: a log of any length is read piece by piece."""
    write(tmp_path, records)
    whole = read_run_log(tmp_path)
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"step": 99, "att')
    monkeypatch.setattr(run_log, "BLOCK_BYTES", block_bytes)
    cut = read_run_log(tmp_path)
    assert cut.steps.equals(whole.steps)
    assert cut.batches.equals(whole.batches)
    assert cut.notes == ("log.jsonl: the last line is still being written and was left out",)


def test_records_of_another_version_are_refused(tmp_path, records):
    write(tmp_path, [records[0].model_copy(update={"schema_version": 9})])
    with pytest.raises(ResumeError, match="schema version 9"):
        read_run_log(tmp_path)


def test_a_run_without_a_log_yet_reads_as_empty(tmp_path):
    log = read_run_log(tmp_path)
    assert log.steps.is_empty()
    assert log.evaluations.is_empty()


def test_of_two_evaluations_of_a_step_the_newer_counts(tmp_path):
    records = [evaluation_record(0, 5.0), evaluation_record(10, 4.0), evaluation_record(10, 3.0, attempt=2)]
    (tmp_path / EVALUATION_FILE).write_text("".join(record.model_dump_json() + "\n" for record in records))
    assert read_run_log(tmp_path).evaluations.get_column("loss").to_list() == [5.0, 3.0]
