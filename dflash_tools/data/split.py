"""The validation split: whole conversations, chosen by the hash of their content."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tools.errors import DataError


def choose_split(
    conversation_ids: Sequence[str], fraction: float, min_validation_samples: int = 0
) -> NDArray[np.bool_]:
    """Choose the held-out samples; all samples of a conversation fall on one side.

    A conversation is held out if its id, read as a fraction of the largest id, is below ``fraction``: the choice
    depends on its content alone, so it stays when other rows come or go. Then more conversations are held out in
    ascending order of their ids until ``min_validation_samples`` are reached.

    Args:
        conversation_ids: One entry per sample, 32 hex digits; a conversation of several samples is repeated.
        fraction: Share of conversations to hold out, 0 <= fraction < 1.
        min_validation_samples: Hold out at least this many samples.

    Returns:
        True = validation. Shape: (num_samples,).

    Raises:
        DataError: If the minimum would leave nothing to train on.
    """
    if not len(conversation_ids):
        return np.zeros(0, dtype=bool)
    # 60 bits are exact in the comparison below and more than enough to order conversations.
    keys = np.array([int(name[:15], 16) for name in conversation_ids], dtype=np.int64)
    held_out: NDArray[np.bool_] = keys < int(fraction * (1 << 60))
    if held_out.sum() >= min_validation_samples:
        return held_out
    unique, counts = np.unique(keys, return_counts=True)
    enough = int(np.searchsorted(np.cumsum(counts), min_validation_samples))
    if enough >= len(unique) - 1:
        raise DataError(
            f"data.min_validation_samples = {min_validation_samples}: the {len(unique)} conversations have "
            f"{len(keys)} samples, so nothing would be left to train on; lower it or add data"
        )
    held_out[:] = keys <= unique[enough]
    return held_out
