"""Random streams that are the same on every machine: each is keyed by (seed, epoch, purpose), none is shared.

Only raw Philox words are used. NumPy fixes those for good, unlike its shuffles and distributions.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every plan: never reuse or reorder them."""

    COMPOSITION = 0  # which samples of a bucket share a window
    BATCHES = 1  # which batch of a bucket takes which of its places
    BUCKETS = 2  # how buckets follow each other
    STORES = 3  # which samples of a store an epoch takes


def random_words(count: int, *, seed: int, epoch: int, purpose: Purpose) -> NDArray[np.uint64]:
    """Draw 64-bit words. Shape: (count,)."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(purpose)))
    words: NDArray[np.uint64] = np.random.Philox(sequence).random_raw(count)
    return words


def random_order(count: int, *, seed: int, epoch: int, purpose: Purpose) -> NDArray[np.int64]:
    """Draw a uniform permutation of ``range(count)``. Shape: (count,)."""
    return np.argsort(random_words(count, seed=seed, epoch=epoch, purpose=purpose), kind="stable")
