"""The estimated acceptance length: how far first guesses agree with the text, without decoding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSums:
    """Sums over blocks that pool by adding.

    Attributes:
        num_blocks: Whole blocks: every drafted slot supervised.
        num_accepted: Drafted tokens accepted in them.
        num_truncated_blocks: Blocks whose supervision stops before their last slot; they are not in the estimate.
    """

    num_blocks: int
    num_accepted: int
    num_truncated_blocks: int

    def __add__(self, other: "AcceptanceSums") -> "AcceptanceSums":
        return AcceptanceSums(
            num_blocks=self.num_blocks + other.num_blocks,
            num_accepted=self.num_accepted + other.num_accepted,
            num_truncated_blocks=self.num_truncated_blocks + other.num_truncated_blocks,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per forward of the target, the bonus token counted; 1 without a whole block."""
        return 1.0 + (self.num_accepted / self.num_blocks if self.num_blocks else 0.0)


def accepted_prefix(correct_AS: Tensor) -> Tensor:
    """Count the right guesses of each block before its first wrong one. Slot 0 is the anchor. Shape: (A,), int64."""
    return correct_AS[:, 1:].long().cumprod(dim=1).sum(dim=1)


def sum_acceptance(correct_AS: Tensor, supervised_A: Tensor) -> AcceptanceSums:
    """Sum the accepted prefixes of the whole blocks.

    Args:
        correct_AS: True where the first guess equals the label. Shape: (A, S).
        supervised_A: Supervised slots of each block. Shape: (A,).
    """
    whole_A = supervised_A == correct_AS.shape[1] - 1
    num_blocks = int(whole_A.sum())
    return AcceptanceSums(
        num_blocks=num_blocks,
        num_accepted=int(torch.where(whole_A, accepted_prefix(correct_AS), 0).sum()),
        num_truncated_blocks=len(whole_A) - num_blocks,
    )
