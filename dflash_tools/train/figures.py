"""What a batch gave, as one row of numbers, so that ranks combine theirs with one sum.

Each rank fills the rows of its own batches and leaves the others zero. After the sum over ranks every rank holds the
same table, and every total is added up in plan order: it does not depend on who computed what.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_tools.drafter.blocks import Blocks
from dflash_tools.drafter.loss import LossSums
from dflash_tools.drafter.metrics import accepted_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sums over blocks; those of several batches pool by adding.

    Attributes:
        loss_sum: Sum of slot weight x loss.
        label_weight: Sum of slot weights.
        num_slots: Supervised slots.
        num_blocks: Whole blocks, which the acceptance estimate averages.
        num_accepted: Drafted tokens accepted in them.
        num_truncated_blocks: Blocks whose supervision stops before their last slot.
        correct_by_slot: Right first guesses at slots 1 and later.
        count_by_slot: Supervised slots at slots 1 and later.
    """

    loss_sum: float
    label_weight: float
    num_slots: int
    num_blocks: int
    num_accepted: int
    num_truncated_blocks: int
    correct_by_slot: tuple[int, ...]
    count_by_slot: tuple[int, ...]

    @property
    def loss(self) -> float:
        """Weighted mean loss; 0 without a supervised slot."""
        return self.loss_sum / self.label_weight if self.label_weight else 0.0

    @property
    def acceptance_length(self) -> float:
        """Estimated tokens per forward of the target, the bonus token counted; 1 without a whole block."""
        return 1.0 + (self.num_accepted / self.num_blocks if self.num_blocks else 0.0)

    @property
    def accuracy_by_slot(self) -> tuple[float, ...]:
        """Share of right first guesses at slots 1 and later; 0 where nothing is supervised."""
        pairs = zip(self.correct_by_slot, self.count_by_slot, strict=True)
        return tuple(correct / count if count else 0.0 for correct, count in pairs)


def num_columns(block_size: int) -> int:
    """Width of a row."""
    return 6 + 2 * (block_size - 1)


def figures_row(sums: LossSums, blocks: Blocks) -> Tensor:
    """Turn the sums of one batch into a row, on its device. Shape: (num_columns,), float64.

    Nothing is copied to the host: that would make it wait for the device after every batch.
    """
    whole_A = blocks.whole_A
    known = torch.tensor([sums.label_weight, blocks.num_slots], dtype=torch.float64)
    return torch.cat(
        [
            sums.weighted_sum.detach().double().reshape(1),
            known.to(whole_A.device, non_blocking=True),
            whole_A.sum().double().reshape(1),
            torch.where(whole_A, accepted_prefix(sums.correct_AS), 0).sum().double().reshape(1),
            (~whole_A).sum().double().reshape(1),
            sums.correct_by_slot.double(),
            sums.count_by_slot.double(),
        ]
    )


def pool(rows: Tensor) -> Figures:
    """Add up rows in their order.

    Args:
        rows: On the CPU. Shape: (num_batches, num_columns), float64.
    """
    # One after another: a vectorised sum would group them differently for different lengths.
    total = [0.0] * rows.shape[1]
    for row in rows.tolist():
        total = [before + value for before, value in zip(total, row, strict=True)]
    num_slots = (len(total) - 6) // 2
    counts = [int(value) for value in total[2:]]
    return Figures(
        loss_sum=total[0],
        label_weight=total[1],
        num_slots=counts[0],
        num_blocks=counts[1],
        num_accepted=counts[2],
        num_truncated_blocks=counts[3],
        correct_by_slot=tuple(counts[4 : 4 + num_slots]),
        count_by_slot=tuple(counts[4 + num_slots :]),
    )
