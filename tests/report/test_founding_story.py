"""The fault this tool was built to show: one bucket in half of all batches, in an order that repeats it."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from report.made import make_index_store, make_run

from dflash_tools.config import CheckpointSection, PlanSettings, TrainConfig
from dflash_tools.plan.buckets import FOUNDING_EDGES
from dflash_tools.report import report_compare, report_plan, report_run
from dflash_tools.report.causes import run_lengths_so_far

PAGE = Path(__file__).parents[2] / "docs" / "founding-story.md"


def founding_config(strategy: str) -> TrainConfig:
    plan = PlanSettings(strategy=strategy, token_budget=16384, batches_per_step=1, num_epochs=1)
    return TrainConfig(plan=plan, checkpoint=CheckpointSection(save_steps=100))


@pytest.fixture(scope="module")
def founding_store(tmp_path_factory) -> Path:
    """4,000 log-normal lengths, median 1,860 and sigma 0.8, in the six buckets of the story."""
    lengths = np.random.default_rng(0).lognormal(np.log(1860), 0.8, 4000)
    return make_index_store(
        tmp_path_factory.mktemp("founding") / "store",
        np.clip(lengths, 16, 8192).astype(np.int32),
        edges=FOUNDING_EDGES,
    )


def forget(batches: pl.DataFrame) -> np.ndarray:
    """After four or more batches of one bucket the others have become worse."""
    bucket_ids = batches.get_column("bucket_id").to_numpy()
    run_before = np.concatenate([[0], run_lengths_so_far(bucket_ids)[:-1]])
    return np.where((np.diff(bucket_ids, prepend=bucket_ids[:1]) != 0) & (run_before >= 4), 0.8, 0.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, founding_store) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("founding-runs")
    return {
        strategy: make_run(folder / strategy, founding_store, founding_config(strategy), fault=forget)
        for strategy in ("shuffle", "interleave")
    }


def test_the_plan_says_it_before_a_gpu_is_touched(founding_store):
    report = report_plan(founding_config("shuffle"), [founding_store])
    longest = report.figures["buckets"][-1]
    assert (longest["bucket_id"], round(longest["share_of_batches"], 2)) == (5, 0.52)
    (sentence,) = report.diagnosis
    assert sentence.startswith("Bucket 5 (3,297 to 8,192 tokens) makes 52% of batches; with `shuffle` there are ")
    assert f"{report.figures['equal_neighbours']:,} neighbouring repeats" in sentence
    assert f"would leave {report.figures['equal_neighbours_minimum']:,} repeats, the minimum" in sentence
    assert sentence in read_page()


def test_interleave_leaves_the_minimum_and_nothing_to_say(founding_store):
    report = report_plan(founding_config("interleave"), [founding_store])
    assert report.figures["equal_neighbours"] == report.figures["equal_neighbours_minimum"] > 0
    assert report.table("run_lengths").get_column("run_length").max() == 2
    assert report.diagnosis == ()


def test_the_run_says_that_the_order_did_it_and_neither_checkpoints_nor_data(runs):
    report = report_run(runs["shuffle"])
    assert report.figures["resets"] > 10
    first, second = report.diagnosis
    assert "right after three or more batches in a row of one bucket (mostly bucket 5)" in first
    assert "the order of batches, not checkpoints or data" in first
    assert "52% of batches" in second
    assert first in read_page()


def test_jumps_after_checkpoints_are_not_blamed_on_the_order(tmp_path, founding_store):
    def disturb(batches):
        step = batches.get_column("step").to_numpy()
        return np.where((step % 100 < 2) & (step > 50), 0.8, 0.0)

    run = make_run(tmp_path / "run", founding_store, founding_config("shuffle"), fault=disturb)
    (sentence,) = [one for one in report_run(run).diagnosis if "resets" in one]
    assert "6 of 6 come right after a checkpoint, as do 2.6% of all steps" in sentence
    assert "6 of 6 resets come right after one, as do 2.6 % of all steps" in read_page()


def test_the_same_weakness_stays_asleep_under_interleave(runs):
    report = report_run(runs["interleave"])
    assert report.figures["resets"] == 0
    assert report.diagnosis == ()


def test_a_comparison_shows_both_orders_side_by_side(runs):
    report = report_compare([runs["shuffle"], runs["interleave"]])
    rows = {row["figure"]: (row["shuffle"], row["interleave"]) for row in report.table("figures").to_dicts()}
    for figure, values in rows.items():
        if figure in ("equal neighbours", "longest run", "resets"):
            assert f"| {figure} | {values[0]} | {values[1]} |" in read_page()


def read_page() -> str:
    return PAGE.read_text(encoding="utf-8").replace("\n> ", " ")
