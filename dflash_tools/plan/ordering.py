"""How buckets follow each other inside an epoch: one function per strategy, each from counts to a sequence."""

from collections.abc import Iterator
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash_tools.plan.streams import Purpose, random_order, random_words

_PLACES_PER_DRAW = 1 << 15  # bounds the memory of random words turned into Python integers


def order_buckets(
    counts: NDArray[np.int64],
    strategy: Literal["interleave", "weighted", "shuffle", "sequential"],
    *,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """Order the batches of an epoch by bucket.

    Args:
        counts: Batches of each bucket; zeros are harmless. Shape: (num_buckets,).
        strategy: See docs/planner.md.
        seed: Seed of the plan.
        epoch: Each epoch has its own order.

    Returns:
        Position in ``counts`` for every place. Shape: (counts.sum(),).
    """
    in_turn = np.repeat(np.arange(len(counts)), counts)
    if strategy == "sequential":
        return in_turn
    if strategy == "shuffle":
        return in_turn[random_order(len(in_turn), seed=seed, epoch=epoch, purpose=Purpose.BUCKETS)]
    draws = _Draws(len(in_turn), len(counts), seed=seed, epoch=epoch)
    if strategy == "weighted":
        return _draw_weighted(counts, draws)
    if 2 * counts.max(initial=0) > len(in_turn) + 1:
        return _separate_majority(counts, draws)
    return _follow_quotas(counts, draws, may_repeat=False)


class _Draws:
    """Random integers below a bound, one row of them per place."""

    def __init__(self, num_places: int, num_buckets: int, *, seed: int, epoch: int) -> None:
        # 32 bits of a word give one integer; the first row is kept for decisions that an epoch takes once.
        words = random_words((num_places + 1) * num_buckets, seed=seed, epoch=epoch, purpose=Purpose.BUCKETS)
        self._words = (words >> np.uint64(32)).reshape(num_places + 1, num_buckets)

    def once(self, bound: int) -> int:
        """One integer in ``range(bound)``, the same at every call."""
        return int(self._words[0, 0]) * bound >> 32

    def rows(self, bound: int) -> Iterator[list[int]]:
        """A row of integers in ``range(bound)`` per place."""
        chunks = (
            self._words[first : first + _PLACES_PER_DRAW] for first in range(1, len(self._words), _PLACES_PER_DRAW)
        )
        return chain.from_iterable((chunk * np.uint64(bound) >> np.uint64(32)).tolist() for chunk in chunks)


def _follow_quotas(counts: NDArray[np.int64], draws: _Draws, *, may_repeat: bool) -> NDArray[np.int64]:
    """At each place take the bucket furthest behind its quota, give or take half a batch.

    Everything is counted in units of 1/num_places of a batch, in whole numbers. Unless ``may_repeat``, the bucket just
    used is passed over, and one that needs every second place from here on is taken at once.
    """
    num_places = int(counts.sum())
    order = np.empty(num_places, dtype=np.int64)
    quota = counts.tolist()
    left = counts.tolist()
    behind = [0] * len(quota)  # quota up to and including this place, less what was used
    used = -1
    buckets = range(len(quota))
    for place, jitter in zip(range(num_places), draws.rows(num_places // 2 + 1), strict=False):
        all_left = num_places - place
        best, best_score = -1, -2 * num_places * num_places
        for bucket in buckets:
            behind[bucket] += quota[bucket]
            if left[bucket] == 0 or (bucket == used and not may_repeat):
                continue
            score = behind[bucket] + jitter[bucket]
            if 2 * left[bucket] > all_left and not may_repeat:
                score += num_places * num_places
            if score > best_score:
                best, best_score = bucket, score
        order[place] = best
        left[best] -= 1
        behind[best] -= num_places
        used = best
    return order


def _separate_majority(counts: NDArray[np.int64], draws: _Draws) -> NDArray[np.int64]:
    """Cut a bucket with more than half of the batches into even runs; each other batch separates two of them."""
    majority = int(np.argmax(counts))
    most, num_runs = int(counts[majority]), int(counts.sum() - counts[majority]) + 1
    others = counts.copy()
    others[majority] = 0
    separators = _follow_quotas(others, draws, may_repeat=True)
    cuts = (np.arange(num_runs + 1, dtype=np.int64) * most + draws.once(num_runs)) // num_runs
    order = np.full(int(counts.sum()), majority, dtype=np.int64)
    order[cuts[1:-1] - cuts[0] + np.arange(num_runs - 1)] = separators
    return order


def _draw_weighted(counts: NDArray[np.int64], draws: _Draws) -> NDArray[np.int64]:
    """Draw in proportion to what is left, never the bucket just used unless the rest could not be placed."""
    num_places = int(counts.sum())
    order = np.empty(num_places, dtype=np.int64)
    left = counts.tolist()
    used = -1
    for place, row in zip(range(num_places), draws.rows(1 << 32), strict=False):
        all_left = num_places - place
        weights = list(left)
        if used >= 0 and 2 * left[used] <= all_left:
            weights[used] = 0
        needed = next((b for b, number in enumerate(left) if b != used and 2 * number > all_left), None)
        best = needed if needed is not None else _pick(weights, row[0])
        order[place] = best
        left[best] -= 1
        used = best
    return order


def _pick(weights: list[int], word: int) -> int:
    """Turn a 32-bit word into a position, in proportion to the weights."""
    mark = word * sum(weights) >> 32
    for position, weight in enumerate(weights):
        mark -= weight
        if mark < 0:
            return position
    raise AssertionError("the weights are all zero")
