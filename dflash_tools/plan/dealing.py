"""Which rank takes which batches of a step: by cost, not by index."""

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray


def deal_to_ranks(costs: ArrayLike, world_size: int) -> list[NDArray[np.int64]]:
    """Deal the batches of one step by longest-processing-time: the costliest first, each to the least loaded rank.

    The load of the busiest rank is at most 4/3 - 1/(3 world_size) of the best possible (Graham, 1969). Ranks may get
    different numbers of batches, and none if there are fewer batches than ranks.

    Args:
        costs: Estimated cost of every batch of the step, in any unit. Shape: (num_batches,).
        world_size: Number of ranks.

    Returns:
        For each rank the positions of its batches inside the step, ascending. Ties go to the lower position and rank.

    Raises:
        ValueError: If ``world_size`` is below 1 or a cost is negative or no number.
    """
    work = np.asarray(costs, dtype=np.float64)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not np.all(work >= 0):
        raise ValueError(f"costs must be numbers and at least 0, got {work.tolist()}")
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    ranks = [(0.0, 0, rank) for rank in range(world_size)]
    for position in np.argsort(-work, kind="stable").tolist():
        load, number, rank = heapq.heappop(ranks)
        dealt[rank].append(position)
        heapq.heappush(ranks, (load + float(work[position]), number + 1, rank))
    return [np.array(sorted(positions), dtype=np.int64) for positions in dealt]
