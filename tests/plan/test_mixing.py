"""Shares of several stores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.config import PlanSettings
from dflash_tools.errors import ConfigError
from dflash_tools.plan import build_plan
from dflash_tools.plan.mixing import choose_samples, passes_per_epoch

stores = st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100)), min_size=1, max_size=5)


@given(stores, st.integers(0, 99), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_samples_of_a_store_come_equally_often(case, seed, num_epochs):
    store_ids = np.repeat(np.arange(len(case), dtype=np.int32), [size for size, _ in case])
    passes = passes_per_epoch(store_ids, [weight for _, weight in case])
    counts = np.zeros(len(store_ids), dtype=int)
    for epoch in range(num_epochs):
        chosen = choose_samples(store_ids, passes, seed=seed, epoch=epoch)
        assert len(set(chosen)) == len(chosen)  # never twice in an epoch
        counts[chosen] += 1
    for store, (size, _) in enumerate(case):
        of_store = counts[store_ids == store]
        assert np.ptp(of_store) <= 1
        assert of_store.sum() == pytest.approx(num_epochs * passes[store] * size, abs=1.001)
    assert passes.max() == 1


def test_shares_follow_the_weights():
    """PL-20: four stores of other sizes; the plan is one table, so no rank runs dry before another."""
    sizes, weights = [5000, 3000, 400, 9000], (0.8, 0.07, 0.07, 0.06)
    store_ids = np.repeat(np.arange(4), sizes)
    lengths = np.full(sum(sizes), 100)
    options = PlanSettings(num_epochs=2, store_weights=weights)
    plan = build_plan(lengths, np.zeros(len(lengths)), options, store_ids=store_ids)
    shares = np.bincount(store_ids[plan.sample_rows]) / len(plan.sample_rows)
    assert np.allclose(shares, weights, atol=0.001)
    assert plan.left_out == {"store_weights": sum(sizes) - len(set(plan.sample_rows))}


def test_what_weights_and_max_steps_leave_out_is_counted_apart():
    store_ids = np.repeat([0, 1], [100, 100])
    options = PlanSettings(num_epochs=1, store_weights=(1, 0.5), max_steps=1, batches_per_step=1, max_batch_size=10)
    plan = build_plan(np.full(200, 100), np.zeros(200), options, store_ids=store_ids)
    assert plan.left_out == {"store_weights": 50, "max_steps": 150 - len(set(plan.sample_rows))}


def test_without_weights_every_sample_of_every_store_comes_once():
    plan = build_plan(np.full(30, 10), np.zeros(30), PlanSettings(num_epochs=1), store_ids=np.arange(30) % 3)
    assert sorted(plan.sample_rows) == list(range(30))


@pytest.mark.parametrize("weights", [[0.5], [1, 1, 1]])
def test_one_weight_per_store(weights):
    with pytest.raises(ConfigError, match=f"{len(weights)} entries for 2 stores"):
        passes_per_epoch(np.array([0, 1], dtype=np.int32), weights)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_bad_weights_are_refused_at_the_start(weight):
    """PL-20: weights of 0, NaN, negative."""
    with pytest.raises(ConfigError, match="positive number"):
        passes_per_epoch(np.array([0, 1], dtype=np.int32), [1.0, weight])


def test_a_store_without_training_samples_cannot_have_a_share():
    with pytest.raises(ConfigError, match=r"store 1 \(counted from 0\) has a weight but no training sample"):
        passes_per_epoch(np.array([0, 2], dtype=np.int32), [1, 1, 1])
