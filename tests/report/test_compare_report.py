import pytest
from report.made import log_normal_lengths, make_index_store, make_run

from dflash_tools.config import PlanSettings, TrainConfig
from dflash_tools.contracts.run_folder import PLAN_FILE
from dflash_tools.errors import ConfigError, ResumeError
from dflash_tools.report import report_compare


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory, store):
    config = TrainConfig(plan=PlanSettings(num_epochs=2, batches_per_step=2, strategy="shuffle"))
    return make_run(tmp_path_factory.mktemp("other") / "shuffled", store, config, held_out=(6.0, 4.4, 4.0, 3.9))


def test_runs_stand_side_by_side_with_the_settings_that_differ(run, shuffled):
    report = report_compare([run, shuffled])
    assert report.table("figures").columns == ["figure", "run", "shuffled"]
    assert report.table("settings").rows() == [("plan.strategy", "interleave", "shuffle")]
    assert report.figures["compared"]["run"]["equal_neighbours"] == 0
    assert report.figures["compared"]["shuffled"]["equal_neighbours"] > 0


def test_the_held_out_loss_of_the_last_common_step_is_compared(run, shuffled):
    (sentence,) = report_compare([run, shuffled]).diagnosis
    assert "the held-out loss of shuffled is 3.900, 0.600 above that of run" in sentence


def test_plan_files_are_compared_by_their_order(run, shuffled):
    report = report_compare([run / PLAN_FILE, shuffled / PLAN_FILE])
    assert report.table("figures").columns == ["figure", "run/plan.parquet", "shuffled/plan.parquet"]
    assert report.diagnosis == ()


def test_runs_on_other_stores_do_not_compare(tmp_path, run, config):
    other = make_run(
        tmp_path / "elsewhere", make_index_store(tmp_path / "store", log_normal_lengths(300, seed=9)), config
    )
    assert "is on another store than run" in report_compare([run, other]).diagnosis[0]


def test_one_path_is_nothing_to_compare(run):
    with pytest.raises(ConfigError, match="at least two"):
        report_compare([run])


def test_a_path_that_is_neither_run_nor_plan_is_refused(tmp_path, run):
    with pytest.raises(ResumeError):
        report_compare([run, tmp_path])
