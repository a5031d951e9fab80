import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import lognormal_lengths

from dflash_tools.plan.buckets import FOUNDING_EDGES, assign_buckets, choose_edges


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
