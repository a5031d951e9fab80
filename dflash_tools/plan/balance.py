"""Even the cost of steps: buckets keep their places, chance and cost say which batch of a bucket takes each of them."""

import numpy as np
from numpy.typing import NDArray

_STEPS_PER_STRETCH = 16  # batches move inside a stretch of so many steps: the order of an epoch stays random


def balance_steps(
    order: NDArray[np.int64], places: NDArray[np.int64], costs: NDArray[np.int64], batches_per_step: int
) -> NDArray[np.int64]:
    """Exchange batches of one bucket between the steps of a stretch until steps cost about the same.

    Buckets are taken in turn, the one whose batches differ most in cost first. Inside a stretch the costliest batch of
    a bucket goes to the step that has the least so far, longest-processing-time once more. A bucket with several places
    in a step takes them one after the other, in as many rounds.

    Args:
        order: Batch at every place of the epoch. Shape: (num_batches,).
        places: Bucket at every place. Shape: (num_batches,).
        costs: Cost of every batch, indexed by batch. Shape: (num_batches,).
        batches_per_step: Places of a step.

    Returns:
        Another batch at every place, of the same bucket and from the same stretch. Shape: (num_batches,).
    """
    balanced = order.copy()
    step = np.arange(len(order)) // batches_per_step
    stretch = step // _STEPS_PER_STRETCH
    load = np.zeros(int(step[-1]) + 1, dtype=np.int64)
    rounds = _rounds(places, step)
    for where in sorted(rounds, key=lambda where: -_variance(costs[order[where]])):
        batches = order[where]
        emptiest = where[np.lexsort((load[step[where]], stretch[where]))]
        costliest = batches[np.lexsort((-costs[batches], stretch[where]))]
        balanced[emptiest] = costliest
        load[step[emptiest]] += costs[costliest]
    return balanced


def _rounds(places: NDArray[np.int64], step: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Part the places such that no part has two places of one step, nor of two buckets."""
    key = places * (int(step[-1]) + 1) + step
    by_key = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[by_key], prepend=-1))
    nth = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    names = places[by_key] * (int(nth.max()) + 1) + nth
    by_name = np.argsort(names, kind="stable")
    return np.split(by_key[by_name], np.flatnonzero(np.diff(names[by_name])) + 1)


def _variance(costs: NDArray[np.int64]) -> float:
    """Variance by whole numbers and one division: no machine rounds it another way."""
    number, total, squares = len(costs), int(costs.sum()), int((costs * costs).sum())
    return (number * squares - total * total) / (number * number)
