"""Every rule speaks up about the run that has its fault."""

import numpy as np
import polars as pl
import pytest
from report.made import log_normal_lengths, make_index_store, make_run

from dflash_tools.config import CheckpointSection, PlanSettings, TrainConfig
from dflash_tools.report import report_run

CONFIG = TrainConfig(
    plan=PlanSettings(num_epochs=2, batches_per_step=1, token_budget=8192), checkpoint=CheckpointSection(save_steps=50)
)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    return make_index_store(tmp_path_factory.mktemp("store") / "store", log_normal_lengths(1500))


def diagnosis(folder, store, **faults) -> str:
    return "\n".join(report_run(make_run(folder / "run", store, CONFIG, **faults)).diagnosis)


def at_steps(is_hit, height=0.8):
    return lambda batches: np.where(is_hit(batches.get_column("step").to_numpy()), height, 0.0)


def test_nothing_is_said_about_a_healthy_run(tmp_path, small_store):
    assert diagnosis(tmp_path, small_store) == ""


def test_resets_after_checkpoints_are_put_down_to_checkpoints(tmp_path, small_store):
    text = diagnosis(tmp_path, small_store, fault=at_steps(lambda step: (step % 50 < 2) & (step >= 50)))
    assert "right after a checkpoint" in text
    assert "saving disturbs training" in text
    assert "interleave" not in text


def test_resets_after_stalls_are_put_down_to_the_data_feed(tmp_path, small_store):
    def stall(record):
        return record.model_copy(update={"data_wait_seconds": 5.0}) if record.step % 67 == 66 else record

    text = diagnosis(tmp_path, small_store, fault=at_steps(lambda step: step % 67 == 66), change_step=stall)
    assert "right after a stall of the data feed" in text


def test_resets_after_a_resume_are_put_down_to_it(tmp_path, small_store):
    def resume(record):
        return record.model_copy(update={"attempt": 1 + record.step // 120})

    is_hit = at_steps(lambda step: (step % 120 < 3) & (step >= 120))
    assert "right after a resume" in diagnosis(tmp_path, small_store, fault=is_hit, change_step=resume)


def test_resets_without_a_company_are_reported_as_such(tmp_path, small_store):
    places = np.random.default_rng(0).choice(np.arange(60, 400), 5, replace=False)
    text = diagnosis(tmp_path, small_store, fault=at_steps(lambda step: np.isin(step, places)))
    assert "resets: the loss rose by" in text
    assert "nothing logged is near them more often" in text


def test_the_batches_around_a_reset_carry_their_sample_ids(tmp_path, small_store):
    report = report_run(make_run(tmp_path / "run", small_store, CONFIG, fault=at_steps(lambda step: step == 200)))
    around = report.table("resets_around")
    assert around.get_column("step").to_list() == list(range(197, 204))
    ids = around.filter(pl.col("step") == 200).item(0, "sample_ids").split(", ")
    assert len(ids) == around.filter(pl.col("step") == 200).item(0, "batch_size")
    assert all(len(one) == 32 for one in ids)


def test_a_store_that_is_gone_costs_only_the_sample_ids(tmp_path):
    store = make_index_store(tmp_path / "store", log_normal_lengths(1500))
    run = make_run(tmp_path / "run", store, CONFIG, fault=at_steps(lambda step: step == 200))
    store.rename(tmp_path / "elsewhere")
    report = report_run(run)
    assert "sample_ids" not in report.table("resets_around").columns
    assert any("sample ids of resets are missing" in note for note in report.notes)


def test_a_loss_that_is_higher_after_every_change_of_bucket_is_named(tmp_path):
    """Too small a jump for a reset, but always there: runs of one bucket undo what the others taught."""
    store = make_index_store(tmp_path / "store", [700] * 300 + [3000] * 300, edges=[700, 3000], num_validation=0)
    plan = PlanSettings(num_epochs=3, batches_per_step=1, token_budget=3000, strategy="shuffle", max_batch_size=1)

    def lag(batches):
        bucket_ids = batches.get_column("bucket_id").to_numpy()
        return np.where(np.diff(bucket_ids, prepend=bucket_ids[:1]) != 0, 0.15, 0.0)

    report = report_run(make_run(tmp_path / "run", store, CONFIG.model_copy(update={"plan": plan}), fault=lag))
    assert report.figures["resets"] == 0
    assert any("Right after a change of bucket the loss lies" in sentence for sentence in report.diagnosis)


def change(**values):
    return lambda record: record.model_copy(update=values)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"change_step": change(data_wait_seconds=0.2)}, "waited for data 50% of the time"),
        ({"change_step": change(checkpoint_seconds=0.1)}, "raise checkpoint.save_steps"),
        ({"change_step": change(grad_norm=7.0)}, "were clipped"),
        ({"held_out": (6.0, 3.5, 3.0, 3.4)}, "later updates did harm"),
        ({"held_out": (6.0, 6.0, 6.0)}, "does not learn to draft"),
        (
            {"change_step": lambda record: record.model_copy(update={"skipped": record.step in (100, 200)})},
            "updates were skipped because their gradients were not finite (steps 100, 200)",
        ),
        (
            {
                "change_step": lambda record: record.model_copy(
                    update={"grad_norm": 0.5 + 0.4 * record.batches[0].bucket_id + 0.01 * (record.step % 7)}
                )
            },
            "of the variance of the grad norm",
        ),
        (
            {
                "change_step": lambda record: record.model_copy(
                    update={"tokens_per_second": record.tokens_per_second * (0.3 if record.step > 350 else 1.0)}
                )
            },
            "something else uses the machine",
        ),
        (
            {
                "change_step": lambda record: record.model_copy(
                    update={"batches": (record.batches[0].model_copy(update={"batch_size": 999}),)}
                )
            },
            "The log is not what was planned",
        ),
    ],
)
def test_every_fault_of_a_run_is_named(tmp_path, small_store, faults, words):
    assert words in diagnosis(tmp_path, small_store, **faults)


def test_at_most_seven_sentences_are_said_heaviest_first(tmp_path, small_store):
    def everything(record):
        return record.model_copy(
            update={
                "data_wait_seconds": 0.3,
                "checkpoint_seconds": 0.3,
                "grad_norm": 5.0 + record.batches[0].bucket_id,
                "skipped": record.step == 9,
                "tokens_per_second": 1000.0 if record.step > 300 else 1e6,
                "batches": (record.batches[0].model_copy(update={"batch_size": 999}),),
            }
        )

    is_hit = at_steps(lambda step: (step % 50 < 2) & (step >= 50))
    run = make_run(tmp_path / "run", small_store, CONFIG, fault=is_hit, change_step=everything, held_out=(6, 6, 9))
    assert len(report_run(run).diagnosis) == 7
