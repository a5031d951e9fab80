import json
import shutil

import polars as pl
import pytest
from report.made import make_run

from dflash_tools.config import PlanSettings, TrainConfig
from dflash_tools.contracts.run_folder import LOG_FILE
from dflash_tools.errors import ResumeError
from dflash_tools.printing import plain
from dflash_tools.report import print_report, report_run, write_report


def test_a_run_is_reported_as_figures_that_json_can_hold(run):
    report = json.loads(json.dumps(plain(report_run(run).to_dict()), allow_nan=False))
    assert report["num_steps"] == report["num_planned_steps"]
    assert report["padding_efficiency"] > 0.9
    assert report["held_out_loss_first"] == 6.0
    assert report["best_step"] == report["num_steps"]
    assert report["resets"] == 0
    assert set(report["eta_squared"]) == {"loss of batches", "loss of steps", "grad norm of steps"}


def test_a_healthy_run_has_no_diagnosis(run):
    assert report_run(run).diagnosis == ()


def test_planned_and_trained_agree_when_the_run_is_over(run):
    rows = report_run(run).table("planned")
    assert rows.filter(pl.col("planned") != pl.col("trained")).is_empty()


def test_a_run_that_still_writes_is_reported_with_a_note(tmp_path, run):
    """LG-07: report runs during train."""
    young = tmp_path / "run"
    shutil.copytree(run, young)
    content = (young / LOG_FILE).read_bytes()
    (young / LOG_FILE).write_bytes(content[: len(content) // 3])
    report = report_run(young)
    assert 0 < report.figures["num_steps"] < report.figures["num_planned_steps"]
    assert report.diagnosis == ()
    assert report.notes == ("log.jsonl: the last line is still being written and was left out",)


def test_a_run_without_a_step_says_so(tmp_path, store, config):
    report = report_run(make_run(tmp_path / "run", store, config, num_steps=0, held_out=()))
    assert report.figures["num_steps"] == 0
    assert "no step has been logged yet" in report.notes


def test_a_run_of_one_step_is_reported(tmp_path, store, config):
    report = report_run(make_run(tmp_path / "run", store, config, num_steps=1, held_out=(5.0,)))
    assert report.figures["num_steps"] == 1


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ResumeError, match=r"run\.json"):
        report_run(tmp_path)


def test_time_is_split_into_data_wait_compute_and_checkpoint(run):
    timing = report_run(run).table("timing")
    assert timing.get_column("work").to_list() == ["data wait", "compute", "checkpoint"]
    assert timing.get_column("share_of_time").sum() == pytest.approx(1.0)


def test_levels_show_what_each_bucket_costs(run):
    levels = report_run(run).table("levels")
    assert levels.get_column("loss").is_sorted()
    assert len(levels) == 6


def test_a_packed_run_is_reported(tmp_path, store):
    packed = TrainConfig(plan=PlanSettings(strategy="packed", num_epochs=1, batches_per_step=2))
    report = report_run(make_run(tmp_path / "run", store, packed))
    assert report.table("levels").get_column("bucket_id").to_list() == [-1]
    assert report.diagnosis == ()


def test_a_run_that_never_had_a_loss_is_reported(tmp_path, store, config):
    def lose(record):
        batches = tuple(batch.model_copy(update={"loss": float("nan")}) for batch in record.batches)
        nothing = {"loss": float("nan"), "grad_norm": float("nan"), "skipped": True, "batches": batches}
        return record.model_copy(update=nothing)

    report = report_run(make_run(tmp_path / "run", store, config, change_step=lose))
    assert "were skipped because their gradients were not finite" in report.diagnosis[0]
    write_report(report, tmp_path / "out")
    print_report(report)
