"""How far first guesses agree with the text, without decoding: what the estimated acceptance length averages."""

from torch import Tensor


def accepted_prefix(correct_AS: Tensor) -> Tensor:
    """Count the right guesses of each block before its first wrong one. Slot 0 is the anchor. Shape: (A,), int64."""
    return correct_AS[:, 1:].long().cumprod(dim=1).sum(dim=1)
