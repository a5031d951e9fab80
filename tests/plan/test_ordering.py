"""The laws of the order of buckets."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_tools.plan.ordering import order_buckets

counts_lists = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.tuples(st.lists(st.integers(0, 15), min_size=1, max_size=8), st.integers(-2, 200)).map(
        lambda case: [*case[0], max(0, sum(case[0]) + case[1])]  # one bucket near or above half
    ),
)


def largest_deviation(order, counts):
    """Most that the count of a bucket in a prefix differs from its share of it. Unit: batches."""
    places = np.arange(1, len(order) + 1)
    used = np.cumsum(order == np.arange(len(counts))[:, None], axis=1)
    return np.abs(used - counts[:, None] * places / len(order)).max()


@given(counts_lists.filter(any), st.integers(0, 2**32), st.integers(0, 9))
@example([1, 1, 1, 1], 0, 0)
@example([1193, 7], 0, 0)
@settings(max_examples=300, deadline=None)
def test_interleave_keeps_both_laws(counts, seed, epoch):
    """PL-07: neighbouring equal buckets as few as mathematics allows, and every prefix holds its share."""
    counts = np.array(counts)
    order = order_buckets(counts, "interleave", seed=seed, epoch=epoch)
    assert np.array_equal(np.bincount(order, minlength=len(counts)), counts)
    assert np.count_nonzero(np.diff(order) == 0) == max(0, 2 * counts.max() - len(order) - 1)
    assert largest_deviation(order, counts) <= 2


@given(counts_lists.filter(any), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_weighted_never_repeats_a_bucket_without_need(counts, seed):
    counts = np.array(counts)
    order = order_buckets(counts, "weighted", seed=seed, epoch=0)
    assert np.array_equal(np.bincount(order, minlength=len(counts)), counts)
    assert np.count_nonzero(np.diff(order) == 0) == max(0, 2 * counts.max() - len(order) - 1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 200), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_runs_of_a_majority_bucket_are_even(others, surplus, seed):
    """Any two stretches of j neighbouring runs differ by at most one batch."""
    counts = np.array([*others, sum(others) + 1 + surplus])
    order = order_buckets(counts, "interleave", seed=seed, epoch=0)
    separators = np.flatnonzero(order != len(others))
    runs = np.diff(separators, prepend=-1, append=len(order)) - 1
    assert len(runs) == sum(others) + 1
    for width in range(1, len(runs) + 1):
        stretches = np.convolve(runs, np.ones(width, dtype=int), mode="valid")
        assert np.ptp(stretches) <= 1


def test_interleave_is_still_random():
    counts = np.array([4, 3, 3, 2])
    orders = {tuple(order_buckets(counts, "interleave", seed=seed, epoch=0)) for seed in range(400)}
    assert len(orders) > 200
    firsts = Counter(order[0] for order in orders)
    assert set(firsts) == {0, 1, 2, 3}


def test_epochs_have_orders_of_their_own():
    counts = np.array([10, 9, 8, 4])
    orders = {tuple(order_buckets(counts, "interleave", seed=0, epoch=epoch)) for epoch in range(50)}
    assert len(orders) == 50


def test_weighted_starves_a_large_bucket_first_and_interleave_does_not():
    """The founding rule puts off the bucket of 45 %: about a third of the first tenth, half of the last."""
    counts = np.array([450, 110, 110, 110, 110, 110])
    for strategy, first, last in (("weighted", 0.34, 0.50), ("interleave", 0.45, 0.45)):
        orders = np.array([order_buckets(counts, strategy, seed=seed, epoch=0) for seed in range(20)])
        assert np.mean(orders[:, :100] == 0) == pytest.approx(first, abs=0.03)
        assert np.mean(orders[:, -100:] == 0) == pytest.approx(last, abs=0.03)


def test_sequential_goes_bucket_by_bucket():
    assert order_buckets(np.array([2, 0, 3]), "sequential", seed=0, epoch=0).tolist() == [0, 0, 2, 2, 2]


def test_shuffle_is_uniform():
    orders = Counter(tuple(order_buckets(np.array([2, 1]), "shuffle", seed=seed, epoch=0)) for seed in range(600))
    assert len(orders) == 3
    assert min(orders.values()) > 150
