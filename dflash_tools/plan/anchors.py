"""How many blocks a sample gets in an epoch; which ones, the drafter draws while training."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


def anchors_per_sample(
    num_valid_anchors: ArrayLike, num_anchors: int, rule: Literal["fixed", "proportional"] = "fixed"
) -> NDArray[np.int64]:
    """Fix the number of anchors of every sample.

    ``fixed`` takes ``num_anchors`` of a sample, or all its valid anchors if it has fewer: tokens of long samples then
    count less. ``proportional`` takes the same share of the valid anchors of every sample, at least one, such that
    samples get ``num_anchors`` on average: every supervised token then counts the same. The share never passes 1.

    Args:
        num_valid_anchors: Positions a with loss_mask[a] and loss_mask[a + 1], per sample. Shape: (num_samples,).
        num_anchors: Anchors wanted per sample.
        rule: How they are shared out.

    Returns:
        Anchors of every sample, never more than its valid ones. Shape: (num_samples,).

    Raises:
        ValueError: If ``num_anchors`` is below 1 or a count of valid anchors is negative.
    """
    valid = np.asarray(num_valid_anchors, dtype=np.int64)
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    if len(valid) and valid.min() < 0:
        raise ValueError(f"num_valid_anchors cannot be negative, got {valid.min()}")
    if rule == "fixed":
        return np.minimum(valid, num_anchors)
    wanted, available = num_anchors * len(valid), int(valid.sum())
    if wanted >= available:
        return valid.copy()
    # Whole numbers throughout (round half up), so that no machine rounds another way.
    share = (2 * valid * wanted + available) // (2 * available)
    return np.maximum(share, np.minimum(valid, 1))
