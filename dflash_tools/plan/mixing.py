"""Several stores in given shares: which samples of each store an epoch takes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tools.errors import ConfigError
from dflash_tools.plan.streams import Purpose, random_words


def passes_per_epoch(store_ids: NDArray[np.int32], weights: Sequence[float]) -> NDArray[np.float64]:
    """Find how much of each store an epoch takes, such that the stores' shares of its samples follow the weights.

    The store in greatest demand for its size is passed once, the others in part: no sample comes twice in an epoch.

    Args:
        store_ids: Store of every training sample. Shape: (num_samples,).
        weights: Share of samples wanted from each store, in any unit. Shape: (num_stores,).

    Returns:
        Passes per epoch, at most 1. Shape: (num_stores,).

    Raises:
        ConfigError: If there are more or fewer weights than stores, a weight is no positive number, or a store has no
            training sample.
    """
    num_stores = int(store_ids.max()) + 1
    if len(weights) != num_stores:
        raise ConfigError(
            f"plan.store_weights has {len(weights)} entries for {num_stores} stores with training samples; "
            "give one per store"
        )
    wanted = np.asarray(weights, dtype=np.float64)
    if not np.all((wanted > 0) & (wanted < np.inf)):
        raise ConfigError(f"plan.store_weights = {list(weights)}: every weight must be a positive number")
    sizes = np.bincount(store_ids, minlength=num_stores)
    if not sizes.all():
        empty = int(np.argmin(sizes))
        raise ConfigError(
            f"store {empty} (counted from 0) has a weight but no training sample; "
            "leave out that store and its entry of plan.store_weights"
        )
    demand = wanted / sizes
    passes: NDArray[np.float64] = demand / demand.max()
    return passes


def choose_samples(
    store_ids: NDArray[np.int32], passes: NDArray[np.float64], *, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Choose the samples of an epoch: the next stretch of every store's own fixed random order, going round.

    After any number of epochs two samples of a store differ by at most one in how often they came.

    Args:
        store_ids: Store of every training sample. Shape: (num_samples,).
        passes: Passes of each store per epoch. Shape: (num_stores,).
        seed: Seed of the plan.
        epoch: The epoch.

    Returns:
        Positions of the chosen samples, ascending.
    """
    words = random_words(len(store_ids), seed=seed, epoch=0, purpose=Purpose.STORES)
    order = np.lexsort((words, store_ids))
    sizes = np.bincount(store_ids, minlength=len(passes))
    chosen = []
    for first, size, part in zip(np.cumsum(sizes) - sizes, sizes, passes, strict=True):
        start, end = samples_before(size, part, epoch), samples_before(size, part, epoch + 1)
        chosen.append(order[first + np.arange(start, end) % size])
    return np.sort(np.concatenate(chosen))


def samples_before(size: int, passes: float, epoch: int) -> int:
    """Count the samples that a store of ``size`` samples gave before an epoch, repeats included."""
    return int(epoch * passes * size)
