"""Figures of a plan, against counts made by hand and by other means."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import lognormal_mix

from dflash_tools.plan import PlanSettings, build_plan, statistics
from dflash_tools.plan.ordering import order_buckets

columns = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=60).map(
    lambda rows: (np.array([bucket for _, bucket in sorted(rows, key=lambda r: r[0])]), np.sort([e for e, _ in rows]))
)


@pytest.fixture(scope="module")
def mix():
    lengths, bucket_ids = lognormal_mix()
    return lengths, bucket_ids, build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2))


def test_lengths_of_batches():
    lengths = np.array([10, 20, 40, 7])
    plan = build_plan(lengths, [0, 0, 1, 1], PlanSettings(num_epochs=1))
    figures = statistics.batch_lengths(plan, lengths)
    first, second = np.argsort(plan.bucket_ids)
    assert [figures.num_samples[first], figures.min_tokens[first], figures.max_tokens[first]] == [2, 10, 20]
    assert [figures.num_tokens[second], figures.num_padded_tokens[second]] == [47, 80]


def test_the_mix_reaches_its_floors(mix):
    """Padding efficiency at least 0.975, at most a fifth of the pairs repeated, no positive lag-1 correlation."""
    lengths, _, plan = mix
    figures = statistics.batch_lengths(plan, lengths)
    assert figures.num_tokens.sum() / figures.num_padded_tokens.sum() >= 0.975
    means = figures.num_tokens / figures.num_samples
    assert statistics.lag_correlations(means, plan.epochs, 1)[0] <= 0


@given(columns)
def test_neighbours_runs_and_transitions_agree(case):
    bucket_ids, epochs = case
    inside = epochs[1:] == epochs[:-1]
    equal = int(((bucket_ids[1:] == bucket_ids[:-1]) & inside).sum())
    runs = statistics.find_runs(bucket_ids, epochs)
    ids, transitions = statistics.count_transitions(bucket_ids, epochs)
    assert statistics.count_equal_neighbours(bucket_ids, epochs) == equal
    assert np.trace(transitions) == equal
    assert transitions.sum() == inside.sum()
    assert np.array_equal(np.repeat(*runs), bucket_ids)
    assert (runs[1] - 1).sum() == equal
    assert list(ids) == sorted(set(bucket_ids))
    assert statistics.fewest_equal_neighbours(bucket_ids, epochs) <= equal


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 99))
@settings(deadline=None)
def test_interleave_has_the_fewest_long_runs(counts, seed):
    order = order_buckets(np.array(counts), "interleave", seed=seed, epoch=0)
    epochs = np.zeros(len(order), dtype=int)
    histogram = np.bincount(statistics.find_runs(order, epochs)[1])
    assert np.array_equal(histogram, statistics.fewest_long_runs(order, epochs))


def test_a_lag_never_crosses_an_epoch():
    values, epochs = np.array([1.0, -1.0, 1.0, -1.0]), np.array([0, 0, 1, 1])
    assert statistics.lag_correlations(values, epochs, 2).tolist() == pytest.approx([-1.0, np.nan], nan_ok=True)
    assert np.isnan(statistics.lag_correlations(np.ones(4), epochs, 1)).all()


@pytest.mark.parametrize("counts", [[900, 800, 700, 600], [500, 3000, 400], [400, 400], [100, 900, 200]])
def test_the_rule_alone_explains_a_random_order_without_repeats(counts):
    lengths = np.array([100.0, 400.0, 1000.0, 3000.0])
    correlations, implied = [], []
    for seed in range(10):
        order = order_buckets(np.array(counts), "weighted", seed=seed, epoch=0)
        epochs = np.zeros(len(order))
        correlations.append(statistics.lag_correlations(lengths[order], epochs, 1))
        implied.append(statistics.rule_alone_correlations(lengths[order], order, epochs, 1))
    assert np.mean(correlations) == pytest.approx(np.mean(implied), abs=0.12)


def test_the_rule_alone_makes_neighbours_differ():
    bucket_ids = np.tile([0, 1, 2], 30)
    implied = statistics.rule_alone_correlations(bucket_ids * 100.0, bucket_ids, np.zeros(90), 3)
    assert implied == pytest.approx([-0.5, 0.25, -0.125])
    single = statistics.rule_alone_correlations(np.arange(9.0), np.zeros(9, dtype=int), np.zeros(9), 1)
    assert single == pytest.approx([0.0])


def test_shares_by_tenth_show_a_drained_bucket():
    bucket_ids = np.concatenate([np.zeros(50), np.ones(50)]).astype(int)
    ids, shares = statistics.shares_by_tenth(np.tile(bucket_ids, 2), np.repeat([0, 1], 100))
    assert ids.tolist() == [0, 1]
    assert shares[:, 0].tolist() == [1.0] * 5 + [0.0] * 5
    assert statistics.depletion(bucket_ids, np.zeros(100))[1].tolist() == [0.5, 1.0]


def test_short_epochs_leave_tenths_empty():
    _, shares = statistics.shares_by_tenth(np.array([0, 1, 1]), np.zeros(3))
    assert np.isnan(shares[:, 0]).sum() == 7


def test_entropy_of_a_step():
    entropy = statistics.entropy_by_step(np.array([0, 1, 2, 3, 5, 5]), np.array([0, 0, 0, 0, 1, 1]))
    assert entropy.tolist() == [2.0, 0.0]


def test_interleaved_steps_hold_more_buckets_than_shuffled_ones(mix):
    lengths, bucket_ids, plan = mix
    shuffled = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2, strategy="shuffle"))
    means = [statistics.entropy_by_step(p.bucket_ids, p.steps).mean() for p in (plan, shuffled)]
    assert means[0] > means[1] + 0.2
