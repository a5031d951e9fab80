"""The laws of a plan, over made lengths and settings."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import EDGES, length_lists, lognormal_mix, ready_made_lengths

from dflash_tools.contracts.fingerprint import fingerprint_of_arrays
from dflash_tools.errors import ConfigError
from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.buckets import assign_buckets
from dflash_tools.plan.composition import binding_limits
from dflash_tools.plan.statistics import (
    batch_lengths,
    count_equal_neighbours,
    fewest_equal_neighbours,
    find_runs,
)
from dflash_tools.plan.table import load_plan, save_plan

STRATEGIES = ("interleave", "weighted", "shuffle", "sequential")


@st.composite
def plan_settings(draw, strategies=STRATEGIES):
    return PlanSettings(
        strategy=draw(st.sampled_from(strategies)),
        token_budget=draw(st.integers(400, 1500)),
        anchor_budget=draw(st.none() | st.integers(20, 100)),
        max_batch_size=draw(st.integers(1, 9)),
        batches_per_step=draw(st.integers(1, 5)),
        sort_window=draw(st.integers(1, 5)),
        num_epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**70)),
    )


def anchors_of(lengths):
    return np.minimum(np.asarray(lengths) // 3, 20)


@given(length_lists(), plan_settings())
@settings(max_examples=150, deadline=None)
def test_every_law_of_a_plan_holds(case, plan_settings):
    lengths, edges = case
    anchors, bucket_ids = anchors_of(lengths), assign_buckets(lengths, edges)
    plan = build_plan(lengths, bucket_ids, plan_settings, anchors)
    for batch in range(len(plan)):
        rows = plan.rows(batch)
        assert set(bucket_ids[rows]) == {plan.bucket_ids[batch]}
        assert len(rows) * lengths[rows].max() <= plan_settings.token_budget
        assert len(rows) <= plan_settings.max_batch_size
        assert plan_settings.anchor_budget is None or anchors[rows].sum() <= plan_settings.anchor_budget
    for epoch in range(plan_settings.num_epochs):
        batches = np.flatnonzero(plan.epochs == epoch)
        rows = plan.sample_rows[plan.offsets[batches[0]] : plan.offsets[batches[-1] + 1]]
        assert sorted(rows) == list(range(len(lengths)))
        # A step never crosses an epoch, and only the last one of an epoch is short.
        sizes = np.unique(plan.steps[batches], return_counts=True)[1]
        assert (sizes[:-1] == plan_settings.batches_per_step).all()
        assert sizes[-1] <= plan_settings.batches_per_step
    assert np.array_equal(np.unique(plan.steps), np.arange(plan.num_steps))
    assert plan.left_out == {}


@given(length_lists(), plan_settings((*STRATEGIES, "packed")), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_an_epoch_does_not_depend_on_what_follows(case, plan_settings, max_steps):
    lengths, edges = case
    bucket_ids = assign_buckets(lengths, edges)
    whole = build_plan(lengths, bucket_ids, plan_settings.model_copy(update={"num_epochs": 3}), anchors_of(lengths))
    for update in ({"num_epochs": 1}, {"num_epochs": 2}, {"num_epochs": 3, "max_steps": max_steps}):
        part = build_plan(lengths, bucket_ids, plan_settings.model_copy(update=update), anchors_of(lengths))
        size = len(part)
        assert np.array_equal(part.steps, whole.steps[:size])
        assert np.array_equal(part.bucket_ids, whole.bucket_ids[:size])
        assert np.array_equal(part.offsets, whole.offsets[: size + 1])
        assert np.array_equal(part.sample_rows, whole.sample_rows[: len(part.sample_rows)])
        if "max_steps" in update:
            assert part.num_steps == min(max_steps, whole.num_steps)
            assert part.left_out.get("max_steps", 0) == len(lengths) - len(set(part.sample_rows))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ready_made_lengths())
def test_ready_made_distributions_plan_at_once(name, strategy):
    """PL-04, PL-05, PL-07, PL-08: exact edges, one bucket, two buckets, one sample, a prime number of batches."""
    lengths = ready_made_lengths()[name]
    bucket_ids = assign_buckets(lengths, EDGES)
    plan = build_plan(lengths, bucket_ids, PlanSettings(token_budget=8192, num_epochs=2, strategy=strategy))
    assert sorted(plan.sample_rows) == sorted([*range(len(lengths))] * 2)
    for epoch in (0, 1):
        order = plan.bucket_ids[plan.epochs == epoch]
        most = np.bincount(order).max()
        if strategy in ("interleave", "weighted"):
            assert np.count_nonzero(np.diff(order) == 0) == max(0, 2 * most - len(order) - 1)


def test_every_epoch_draws_other_batches():
    """PL-11: epochs differ, each can be made again, and the epoch is an argument, not a hidden state."""
    lengths, bucket_ids = lognormal_mix(600)
    first, second = (build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2)) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    batches = [{frozenset(first.rows(b)) for b in np.flatnonzero(first.epochs == epoch)} for epoch in (0, 1)]
    assert len(batches[0] & batches[1]) < len(batches[0]) / 10
    assert build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2, seed=1)).fingerprint() != first.fingerprint()


def test_global_random_state_does_not_reach_the_plan():
    """PL-10, PL-14: a disturbed generator changes nothing, and planning disturbs none."""
    lengths, bucket_ids = lognormal_mix(300)
    plan = build_plan(lengths, bucket_ids, PlanSettings())
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    assert build_plan(lengths, bucket_ids, PlanSettings()).fingerprint() == plan.fingerprint()
    assert np.array_equal(before, np.random.get_state()[1])


def test_the_plan_is_the_same_everywhere():
    """Pinned: an order that changes with a version of anything must be seen here, not met in a resume."""
    lengths = np.arange(1, 400)
    bucket_ids = assign_buckets(lengths, [100, 200, 400])
    pinned = {
        "interleave": "2f751df396d48026",
        "weighted": "ebe78f9f68d6cfaa",
        "shuffle": "904ac1f903410a83",
        "sequential": "47673ce718d815a3",
        "packed": "f766b99acee587c4",
    }
    for strategy, fingerprint in pinned.items():
        plan = build_plan(lengths, bucket_ids, PlanSettings(strategy=strategy, token_budget=2000, num_epochs=2))
        columns = (plan.epochs, plan.steps, plan.bucket_ids, plan.offsets, plan.sample_rows)
        assert fingerprint_of_arrays(*columns)[:16] == fingerprint, strategy


def test_another_process_makes_the_same_plan():
    code = (
        "import numpy as np; from dflash_tools.plan import *; from dflash_tools.plan.buckets import assign_buckets;"
        "x = np.arange(1, 400); print(build_plan(x, assign_buckets(x, [100, 400]), PlanSettings()).fingerprint())"
    )
    lengths = np.arange(1, 400)
    plan = build_plan(lengths, assign_buckets(lengths, [100, 400]), PlanSettings())
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == plan.fingerprint()


def test_a_sample_beyond_the_budget_is_refused_with_count_and_longest():
    """PL-01: one token too many stops the planning with a sentence, not after hours."""
    lengths = [100] * 50 + [201, 300]
    message = re.escape("2 of 52 samples are beyond plan.token_budget = 200; the largest has 300 tokens")
    with pytest.raises(ConfigError, match=message):
        build_plan(lengths, np.zeros(52), PlanSettings(token_budget=200))


def test_a_sample_with_too_many_anchors_is_refused():
    with pytest.raises(ConfigError, match=r"plan.anchor_budget = 5; the largest has 6 anchors"):
        build_plan([10, 10], [0, 0], PlanSettings(anchor_budget=5), [5, 6])


def test_a_sample_beyond_the_budget_may_go_alone():
    """PL-01, PL-02: nothing is lost and no batch is empty."""
    lengths = np.array([100] * 50 + [201, 300])
    plan = build_plan(lengths, np.zeros(52), PlanSettings(token_budget=200, too_long="alone", num_epochs=1))
    assert sorted(plan.sample_rows) == list(range(52))
    for batch in range(len(plan)):
        rows = plan.rows(batch)
        assert len(rows) * lengths[rows].max() <= 200 or len(rows) == 1


def test_a_sample_with_too_many_anchors_may_go_alone():
    anchors = np.array([3, 9, 1, 12, 2, 2])
    options = PlanSettings(anchor_budget=5, too_long="alone", num_epochs=1)
    plan = build_plan(np.full(6, 10), np.zeros(6), options, anchors)
    assert all(anchors[plan.rows(b)].sum() <= 5 or len(plan.rows(b)) == 1 for b in range(len(plan)))


@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_a_sample_of_exactly_the_budget_fits(max_batch_size):
    """PL-04: 4,096 tokens under a budget of 4,096 make a batch of one; 4,097 are beyond it."""
    options = PlanSettings(token_budget=4096, max_batch_size=max_batch_size, num_epochs=1)
    plan = build_plan([4096, 4095], [0, 0], options)
    assert len(plan) == 2
    with pytest.raises(ConfigError, match="the largest has 4097 tokens"):
        build_plan([4096, 4095, 4097], [0, 0, 0], options)


def test_rows_of_the_index_stand_in_the_plan():
    plan = build_plan([5, 5, 5], [0, 0, 0], PlanSettings(num_epochs=1), rows=[10, 20, 40], store_fingerprint="ab")
    assert sorted(plan.sample_rows) == [10, 20, 40]
    assert plan.store_fingerprint == "ab"


def test_without_samples_the_plan_is_empty(tmp_path):
    plan = build_plan([], [], PlanSettings(store_weights=(1, 2)))
    assert (len(plan), plan.num_steps, plan.left_out) == (0, 0, {})
    save_plan(plan, tmp_path / "plan.parquet")
    assert load_plan(tmp_path / "plan.parquet").fingerprint() == plan.fingerprint()
    assert len(batch_lengths(plan, []).num_tokens) == 0
    assert binding_limits(plan, []) == []


def test_arrays_must_fit_each_other():
    with pytest.raises(ValueError, match="one entry per sample"):
        build_plan([1, 2], [0], PlanSettings())
    with pytest.raises(ValueError, match="at least 1 token"):
        build_plan([1, 0], [0, 0], PlanSettings())
    with pytest.raises(ValueError, match="anchor_budget needs num_anchors"):
        build_plan([1], [0], PlanSettings(anchor_budget=4))


def test_the_founding_story():
    """Six buckets, the longest 52 % of the batches: `shuffle` makes long runs of it, `interleave` almost none."""
    generator = np.random.default_rng(0)
    bounds = [1, *EDGES]
    # One batch holds 16,384 // longest samples; so many samples make 96 batches of every other bucket, 520 of the last.
    num_samples = [96 * 21, 96 * 13, 96 * 9, 96 * 6, 96 * 4, 520 * 2]
    lengths = np.concatenate([generator.integers(bounds[b] + 1, bounds[b + 1] + 1, num_samples[b]) for b in range(6)])
    bucket_ids = assign_buckets(lengths, EDGES)
    runs = {}
    for strategy in ("shuffle", "interleave"):
        plan = build_plan(lengths, bucket_ids, PlanSettings(strategy=strategy, num_epochs=1))
        share = np.mean(plan.bucket_ids == 5)
        assert share == pytest.approx(0.52, abs=0.03)
        lengths_of_runs = find_runs(plan.bucket_ids, plan.epochs)[1]
        runs[strategy] = np.bincount(lengths_of_runs, minlength=4)
    assert runs["shuffle"][4:].sum() > 20
    assert runs["interleave"][3:].sum() == 0
    equal = count_equal_neighbours(plan.bucket_ids, plan.epochs)
    assert equal == fewest_equal_neighbours(plan.bucket_ids, plan.epochs)
