import json
import subprocess
import sys

import polars as pl
import pytest
from report.made import log_normal_lengths, make_index_store, plan_of

from dflash_tools.config import LossSection, PlanSettings, TrainConfig
from dflash_tools.errors import StoreError
from dflash_tools.printing import plain
from dflash_tools.report import report_plan


def test_the_json_form_has_the_names_that_scripts_rely_on(store, config):
    report = json.loads(json.dumps(plain(report_plan(config, [store]).to_dict()), allow_nan=False))
    assert 0.9 < report["padding_efficiency"] <= 1
    assert report["equal_neighbours"] == report["equal_neighbours_minimum"] == 0
    assert [bucket["bucket_id"] for bucket in report["buckets"]] == [0, 1, 2, 3, 4, 5]
    assert report["diagnosis"] == []


def test_the_plan_reported_is_the_plan_that_train_makes(store, config):
    assert report_plan(config, [store]).figures["plan_fingerprint"] == plan_of(store, config).fingerprint()


def test_held_out_samples_are_not_part_of_the_plan(store, config):
    assert report_plan(config, [store]).figures["num_samples"] == 1500 - 4


def test_a_proportional_anchor_rule_weighs_every_token_the_same(store):
    loss = LossSection(num_anchors=100, anchor_rule="proportional")
    weights = report_plan(TrainConfig(loss=loss), [store]).table("anchor_weights").get_column("token_weight")
    assert weights.to_list() == pytest.approx([1.0] * 6, abs=0.02)


def test_the_limit_that_ends_a_batch_is_named_by_bucket(tmp_path):
    """PL-19: batch size 64, but the token limit wins; and the reverse."""
    store = make_index_store(tmp_path / "store", [200] * 5000, edges=[200])
    narrow = report_plan(TrainConfig(plan=PlanSettings(token_budget=4400, max_batch_size=64)), [store])
    wide = report_plan(TrainConfig(plan=PlanSettings(token_budget=100_000, max_batch_size=8)), [store])
    assert narrow.table("limits").row(0, named=True)["share_ended_by_tokens"] > 0.5
    assert wide.table("limits").row(0, named=True)["share_ended_by_batch_size"] > 0.9
    assert any("plan.max_batch_size" in sentence for sentence in wide.diagnosis)


@pytest.mark.parametrize("lengths", [[100], [100] * 40, [10, 5000]])
def test_single_and_empty_buckets_are_reported_without_a_fault(tmp_path, lengths):
    """PL-08: all samples in one of six buckets, two non-empty buckets, one sample in total."""
    store = make_index_store(tmp_path / "store", lengths, edges=[50, 200, 770, 1216, 3296, 8192], num_validation=0)
    report = report_plan(TrainConfig(), [store])
    assert report.figures["num_samples"] == len(lengths)


def test_a_packed_plan_is_reported_with_the_buckets_of_its_samples(store):
    report = report_plan(TrainConfig(plan=PlanSettings(strategy="packed", num_epochs=1)), [store])
    assert report.table("buckets").get_column("bucket_id").to_list() == [-1]
    assert len(report.table("anchor_weights")) == 6
    assert report.figures["padding_efficiency"] > 0.98


def test_dealing_by_cost_is_never_worse_than_by_position(store):
    ranks = report_plan(TrainConfig(plan=PlanSettings(batches_per_step=8)), [store]).table("ranks")
    assert ranks.get_column("num_ranks").to_list() == [2, 4, 8]
    assert (ranks.get_column("mean_by_cost") <= ranks.get_column("mean_by_position")).all()
    assert (ranks.get_column("mean_by_cost") >= 1).all()


def test_batch_mates_that_meet_again_are_counted(store, config):
    assert report_plan(config, [store]).figures["share_of_repeated_pairs"] <= 0.2


def test_every_bucket_lasts_to_the_end_of_an_epoch_under_interleave(store, config):
    """PL-07: the step at which the first bucket is used up is reported."""
    assert report_plan(config, [store]).table("depletion").get_column("share_of_epoch").min() > 0.85
    sequential = TrainConfig(plan=PlanSettings(strategy="sequential", num_epochs=1))
    assert report_plan(sequential, [store]).table("depletion").get_column("share_of_epoch").min() < 0.3


def test_two_stores_are_planned_as_one(tmp_path, store, config):
    other = make_index_store(tmp_path / "other", log_normal_lengths(200, seed=5), edges=[1000, 8192])
    report = report_plan(config, [store, other])
    assert report.figures["num_samples"] == 1500 + 200 - 8


def test_a_store_that_is_not_there_is_named(tmp_path, config):
    with pytest.raises(StoreError, match="no-store"):
        report_plan(config, [tmp_path / "no-store"])


def test_batches_and_steps_are_tables_of_their_own(store, config):
    report = report_plan(config, [store])
    batches, steps = report.table("batches"), report.table("step_composition")
    assert len(batches) == report.figures["num_batches"]
    assert steps.get_column("num_tokens").sum() == batches.get_column("num_tokens").sum()
    assert all(dtype.is_numeric() for dtype in batches.dtypes), "LG-08: no text in the table of batches"
    assert isinstance(steps, pl.DataFrame)


def test_a_report_imports_neither_torch_nor_zarr():
    heavy = "{'torch', 'zarr', 'transformers', 'altair'}"
    code = f"import sys, dflash_tools.report; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
