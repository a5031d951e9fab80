"""Anchors: the real tokens that blocks start from. Pure NumPy."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def valid_anchors(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Find the positions where this token and the next one are supervised, ascending.

    Args:
        loss_mask: 1 for a supervised token of one sample. Shape: (num_tokens,).
    """
    supervised = np.asarray(loss_mask) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_anchors(
    loss_mask: NDArray[np.uint8], num_anchors: int, *, seed: int, epoch: int, sample_id: str
) -> NDArray[np.int64]:
    """Draw anchors of one sample uniformly without replacement, ascending.

    The draw depends on nothing but its arguments: no batch, rank, strategy or restart changes it. Fewer anchors of the
    same key are a subset of more.

    Args:
        loss_mask: 1 for a supervised token. Shape: (num_tokens,).
        num_anchors: Most anchors to draw; a sample with fewer valid ones gives them all.
        seed: Seed of the run.
        epoch: Epoch, counted from 0; -1 for the fixed anchors of an evaluation.
        sample_id: Identity of the sample's content.

    Returns:
        min(num_anchors, valid) positions. Shape: (num_drawn,).
    """
    valid = valid_anchors(loss_mask)
    if num_anchors >= len(valid):
        return valid
    digest = hashlib.sha256(f"anchors/{seed}/{epoch}/{sample_id}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    # The smallest of raw counter-based bits: NumPy keeps those for ever, but not the algorithm of Generator.choice.
    order = np.argsort(np.random.Philox(key=key).random_raw(len(valid)), kind="stable")
    return np.sort(valid[order[:num_anchors]])
