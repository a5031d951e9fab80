import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.config import PlanSettings
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan import build_plan
from dflash_tools.plan.buckets import assign_buckets
from dflash_tools.report import composition
from dflash_tools.report.composition import SampleColumns
from dflash_tools.report.composition_sections import compose


def samples_of(num_tokens, bucket_ids) -> SampleColumns:
    lengths = np.asarray(num_tokens, dtype=np.int64)
    return SampleColumns(
        num_tokens=lengths,
        bucket_ids=np.asarray(bucket_ids, dtype=np.int32),
        num_supervised_tokens=lengths // 2,
        num_valid_anchors=np.maximum(lengths // 2 - 1, 0),
        num_anchors=np.maximum(lengths // 2 - 1, 0),
    )


def plan_of_batches(batches, bucket_ids, **plan_settings) -> BatchPlan:
    sizes = [len(rows) for rows in batches]
    return BatchPlan(
        epochs=np.zeros(len(batches), np.int32),
        steps=np.arange(len(batches), dtype=np.int64),
        bucket_ids=np.asarray(bucket_ids, np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        sample_rows=np.concatenate(batches).astype(np.int64),
        settings=plan_settings,
    )


def test_real_padded_and_supervised_tokens_are_three_numbers_and_efficiency_is_a_ratio_of_sums():
    """LG-05: lengths [10, 10, 5] padded to 10 are 25/30; the whole is no mean of ratios."""
    samples = samples_of([10, 10, 5, 40], [0, 0, 0, 1])
    batches = composition.frame_of_plan(plan_of_batches([[0, 1, 2], [3]], [0, 1]), samples)
    assert batches.get_column("num_tokens").to_list() == [25, 40]
    assert batches.get_column("num_padded_tokens").to_list() == [30, 40]
    assert batches.get_column("num_supervised_tokens").to_list() == [12, 20]
    assert composition.padding_efficiency(batches) == 65 / 70


def test_the_unused_end_of_a_packed_row_counts_as_padding():
    """LG-05: lengths [10, 10, 5] in 48 padded tokens are 25/48."""
    plan = plan_of_batches([[0, 1, 2]], [-1], token_budget=48)
    batches = composition.frame_of_plan(plan, samples_of([10, 10, 5], [0, 0, 0]))
    assert composition.padding_efficiency(batches) == 25 / 48


lengths_and_seed = st.tuples(st.lists(st.integers(1, 200), min_size=1, max_size=80), st.integers(0, 1000))


@settings(max_examples=40)
@given(lengths_and_seed, st.sampled_from(["interleave", "shuffle", "sequential", "weighted"]))
def test_shares_of_buckets_sum_to_one_and_runs_hold_every_batch(drawn, strategy):
    lengths, seed = drawn
    bucket_ids = assign_buckets(lengths, [20, 60, 200])
    wanted = PlanSettings(strategy=strategy, token_budget=400, num_epochs=2, batches_per_step=3, seed=seed)
    plan = build_plan(lengths, bucket_ids, wanted)
    whole = compose(composition.frame_of_plan(plan, samples_of(lengths, bucket_ids)))
    for share in ("share_of_batches", "share_of_samples", "share_of_tokens"):
        assert whole.buckets.get_column(share).sum() == pytest.approx(1.0)
    runs = whole.runs
    for column in ("num_runs", "num_runs_unavoidable"):
        assert (runs.get_column("run_length") * runs.get_column(column)).sum() == len(plan)
    num_runs = runs.get_column("num_runs").sum()
    assert whole.equal_neighbours == len(plan) - num_runs
    assert whole.equal_neighbours >= whole.equal_neighbours_minimum
    assert whole.steps.get_column("num_batches").sum() == len(plan)
    assert whole.buckets.get_column("samples_per_epoch").sum() == len(lengths)
    assert whole.transitions.get_column("count").sum() == len(plan) - 2  # pairs inside two epochs


def test_transitions_say_what_follows_a_bucket():
    plan = plan_of_batches([[0], [1], [2], [3]], [0, 1, 0, 1])
    frame = composition.transition_frame(composition.frame_of_plan(plan, samples_of([9, 9, 9, 9], [0, 1, 0, 1])))
    follow = {(row["from_bucket"], row["to_bucket"]): row["share"] for row in frame.iter_rows(named=True)}
    assert follow["bucket 0", "bucket 1"] == 1.0
    assert follow["bucket 0", "bucket 0"] == 0.0


def test_a_packed_plan_has_one_bucket_of_that_name():
    plan = plan_of_batches([[0, 1], [2]], [-1, -1], token_budget=32)
    batches = composition.frame_of_plan(plan, samples_of([20, 10, 30], [0, 0, 1]))
    assert composition.with_labels(batches).get_column("bucket").to_list() == ["packed", "packed"]
    assert composition.padding_efficiency(batches) == 60 / 64


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_the_length_histogram_holds_every_sample_and_token(lengths):
    frame = composition.length_frame(np.array(lengths))
    assert frame.get_column("num_samples").sum() == len(lengths)
    assert frame.get_column("num_tokens").sum() == sum(lengths)


@given(st.integers(1, 5000), st.integers(1, 300))
def test_thinning_keeps_the_mean_and_says_what_a_point_is(number, most):
    frame = pl.DataFrame({"value": np.arange(number, dtype=float)})
    thinned, remark = composition.thin(frame, most)
    assert len(thinned) <= most
    assert (remark == "") == (number <= most)
    if number % max(1, -(-number // most)) == 0:
        assert thinned.get_column("value").mean() == pytest.approx(frame.get_column("value").mean())
