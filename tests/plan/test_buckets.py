from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import lognormal_lengths

from dflash_tools.plan.buckets import FOUNDING_EDGES, assign_buckets, choose_edges, choose_edges_optimal


@pytest.mark.parametrize("bucket_id", range(6))
def test_an_edge_belongs_to_the_bucket_it_closes(bucket_id):
    """PL-05: b - 1 and b lie in bucket b, b + 1 in the next; a sample is in exactly one bucket."""
    edge = FOUNDING_EDGES[bucket_id]
    assert assign_buckets([edge - 1, edge], FOUNDING_EDGES).tolist() == [bucket_id, bucket_id]
    if bucket_id < 5:
        assert assign_buckets([edge + 1], FOUNDING_EDGES).tolist() == [bucket_id + 1]


def test_lengths_outside_every_bucket_are_refused():
    """PL-05: 0 and one above the last edge."""
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        assign_buckets([0, 5], FOUNDING_EDGES)
    with pytest.raises(ValueError, match="1 samples are longer than the last edge, 8192 tokens; the longest has 8193"):
        assign_buckets([1, 8193], FOUNDING_EDGES)


@pytest.mark.parametrize("edges", [[], [0, 5], [5, 5], [7, 5]])
def test_edges_must_ascend(edges):
    with pytest.raises(ValueError, match="must be positive and ascend"):
        assign_buckets([1], edges)


def test_edges_share_the_tokens_evenly():
    lengths = lognormal_lengths()
    edges = choose_edges(lengths, 6)
    mass = np.bincount(assign_buckets(lengths, edges), weights=lengths) / lengths.sum()
    assert np.allclose(mass, 1 / 6, atol=0.002)
    assert edges[-1] == lengths.max()


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 12))
def test_as_many_buckets_as_asked_if_lengths_allow(lengths, count):
    edges = choose_edges(lengths, count)
    assert len(edges) == min(count, len(set(lengths)))
    assert edges[-1] == max(lengths)
    assert len(set(assign_buckets(lengths, edges))) == len(edges)


def padding(lengths, edges):
    return sum(
        int(edges[bucket_id]) - length
        for bucket_id, length in zip(assign_buckets(lengths, edges), lengths, strict=True)
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 4))
def test_optimal_edges_pad_least(lengths, count):
    edges = choose_edges_optimal(lengths, count)
    distinct = sorted(set(lengths))
    assert len(edges) == min(count, len(distinct))
    assert edges[-1] == distinct[-1]
    assert (np.diff(edges) > 0).all()
    every = ([*inner, distinct[-1]] for inner in combinations(distinct[:-1], len(edges) - 1))
    assert padding(lengths, edges) == min(padding(lengths, candidate) for candidate in every)


def test_optimal_edges_beat_equal_mass_on_the_mix():
    lengths = lognormal_lengths()
    assert padding(lengths, choose_edges_optimal(lengths, 6)) < padding(lengths, choose_edges(lengths, 6))


@pytest.mark.parametrize("choose", [choose_edges, choose_edges_optimal])
def test_edges_need_samples_and_a_bucket(choose):
    with pytest.raises(ValueError, match="at least one sample"):
        choose([], 3)
    with pytest.raises(ValueError, match="at least 1 bucket"):
        choose([5], 0)
