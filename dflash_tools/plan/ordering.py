"""How buckets follow each other inside an epoch: one function per strategy, each from counts to a sequence."""

from collections.abc import Iterator, Sequence
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
    return _follow_quotas(counts, range(len(in_turn)), len(in_turn), draws)


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


def _follow_quotas(
    counts: NDArray[np.int64], places: Sequence[int], num_places: int, draws: _Draws
) -> NDArray[np.int64]:
    """At each place take the bucket furthest behind its quota, give or take half a batch.

    Everything is counted in units of 1/num_places of a batch, in whole numbers. Where the places are neighbours, the
    bucket just used is passed over, and one that needs every second place from here on is taken at once.

    Args:
        counts: Batches of each bucket to place. Shape: (num_buckets,).
        places: Where, ascending: all of the epoch, or those between the runs of another bucket. Shape: (counts.sum(),).
        num_places: Batches of the epoch.
        draws: Random integers.
    """
    order = np.empty(len(places), dtype=np.int64)
    neighbours = len(places) == num_places
    share, left = counts.tolist(), counts.tolist()
    behind = [0] * len(share)  # quota of all places before the next one to fill, less what was used
    used, done, urgent = -1, 0, num_places * num_places
    buckets = range(len(share))
    rows = draws.rows(num_places // 2 + 1)
    for turn, jitter in zip(range(len(places)), rows, strict=False):
        upcoming = places[turn + 1] if turn + 1 < len(places) else num_places
        passed, done = upcoming - done, upcoming
        all_left = len(places) - turn
        best, best_score = -1, -2 * urgent
        for bucket in buckets:
            behind[bucket] += share[bucket] * passed
            if left[bucket] == 0 or (bucket == used and neighbours):
                continue
            score = behind[bucket] + jitter[bucket]
            if neighbours and 2 * left[bucket] > all_left:
                score += urgent
            if score > best_score:
                best, best_score = bucket, score
        order[turn] = best
        left[best] -= 1
        behind[best] -= num_places
        used = best
    return order


def _separate_majority(counts: NDArray[np.int64], draws: _Draws) -> NDArray[np.int64]:
    """Cut a bucket with more than half of the batches into even runs; each other batch separates two of them."""
    majority = int(np.argmax(counts))
    most, num_places = int(counts[majority]), int(counts.sum())
    num_runs = num_places - most + 1
    cuts = (np.arange(num_runs + 1, dtype=np.int64) * most + draws.once(num_runs)) // num_runs
    between = cuts[1:-1] - cuts[0] + np.arange(num_runs - 1)
    others = counts.copy()
    others[majority] = 0
    order = np.full(num_places, majority, dtype=np.int64)
    order[between] = _follow_quotas(others, between.tolist(), num_places, draws)
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
