import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.plan.dealing import deal_to_ranks


@given(st.lists(st.floats(0, 1e6), max_size=20), st.integers(1, 9))
def test_every_batch_goes_to_exactly_one_rank(costs, world_size):
    dealt = deal_to_ranks(costs, world_size)
    assert len(dealt) == world_size
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(costs)))
    assert all((np.diff(positions) > 0).all() for positions in dealt)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=24), st.integers(1, 8))
def test_the_busiest_rank_is_near_the_best_possible(costs, world_size):
    loads = [sum(costs[p] for p in positions) for positions in deal_to_ranks(costs, world_size)]
    # List scheduling: mean load plus at most the last batch that the busiest rank took.
    assert max(loads) <= max(max(costs), sum(costs) / world_size + sorted(costs)[-min(len(costs), world_size + 1)])


def test_long_batches_are_dealt_first():
    loads = [sum([7, 7, 6, 6, 5, 5, 4, 4][p] for p in part) for part in deal_to_ranks([7, 7, 6, 6, 5, 5, 4, 4], 4)]
    assert loads == [11, 11, 11, 11]


def test_a_rank_may_stay_without_a_batch():
    """PL-09: three batches on four ranks."""
    assert [len(part) for part in deal_to_ranks([1, 1, 1], 4)] == [1, 1, 1, 0]


def test_costs_of_zero_are_spread_too():
    assert [len(part) for part in deal_to_ranks([0, 0, 0, 0], 2)] == [2, 2]


@pytest.mark.parametrize("costs", [[-1.0], [float("nan")]])
def test_costs_must_be_numbers(costs):
    with pytest.raises(ValueError, match="at least 0"):
        deal_to_ranks(costs, 2)


def test_there_is_at_least_one_rank():
    with pytest.raises(ValueError, match="world_size"):
        deal_to_ranks([1], 0)
