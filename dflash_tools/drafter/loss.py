"""The loss of supervised slots, as a sum; the head's logits exist one chunk of rows at a time.

In shapes: A blocks, S slots, N supervised slots, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_tools.drafter.blocks import Blocks
from dflash_tools.drafter.distill import ROW_LOSSES, distance_rows
from dflash_tools.drafter.frozen import Head

CHUNK_ROWS = 512


LossType = Literal["ce", "dpace", "kd", "tv", "lk", "lk_hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised.

    Attributes:
        type: ``ce``: hard labels with decaying slot weights; ``dpace``: hard labels with the weights of D-PACE; the
            others: a distance to the target's own distribution, with decaying slot weights.
        dpace_alpha: Smoothing of D-PACE.
    """

    type: LossType = "ce"
    dpace_alpha: float = 0.5

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's last hidden state is read."""
        return self.type in ROW_LOSSES


CROSS_ENTROPY = Objective()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossSums:
    """Sums over the blocks of a batch; adding those of the batches of a step is exact in meaning: nothing is a mean.

    Attributes:
        weighted_sum: Sum of weight x loss over all supervised slots; carries the gradient. float32 scalar.
        label_weight: Sum of the weights that were used.
        loss_A: Weighted loss of each block, without gradient. float32.
        correct_AS: True where the first guess equals the label; False where unsupervised.
        supervised_A: Supervised slots of each block.
    """

    weighted_sum: Tensor
    label_weight: float
    loss_A: Tensor
    correct_AS: Tensor
    supervised_A: Tensor

    @property
    def correct_by_slot(self) -> Tensor:
        """Right first guesses at slots 1 .. S - 1. int64."""
        return self.correct_AS[:, 1:].sum(dim=0)

    @property
    def count_by_slot(self) -> Tensor:
        """Supervised slots at slots 1 .. S - 1. int64."""
        slots = torch.arange(1, self.correct_AS.shape[1], device=self.supervised_A.device)
        return (slots <= self.supervised_A[:, None]).sum(dim=0)


def dpace_weights(loss_AS: Tensor, supervised_AS: Tensor, alpha: float) -> Tensor:
    """Weigh slots by how far a block gets (D-PACE, arXiv 2605.18810).

    With q the probability of the label and q' = (1 - alpha) q + alpha, slot j weighs the sum over m >= j of the
    products of q' over slots 1..m. Unsupervised slots act as 1 in products and 0 in sums.

    Args:
        loss_AS: Cross-entropy of each slot.
        supervised_AS: Whether a slot counts.
        alpha: Smoothing.

    Returns:
        Weights, 0 where unsupervised. Shape: (A, S).
    """
    smoothed_AS = torch.where(supervised_AS, (1 - alpha) * torch.exp(-loss_AS) + alpha, 1.0)
    reached_AS = smoothed_AS.cumprod(dim=1) * supervised_AS
    return reached_AS.flip(1).cumsum(dim=1).flip(1) * supervised_AS


def block_loss(
    hidden_ASH: Tensor,
    blocks: Blocks,
    head: Head,
    objective: Objective = CROSS_ENTROPY,
    teacher_NH: Tensor | None = None,
) -> LossSums:
    """Sum the weighted loss of all supervised slots.

    Only supervised slots go through the head.

    Args:
        hidden_ASH: What the drafter returns.
        blocks: The blocks it was given.
        head: The target's head.
        objective: What is minimised.
        teacher_NH: What the target's head reads at the supervised slots, from ``teacher_rows``; for distances only.

    Returns:
        The sums; a batch without a supervised slot gives 0 and a zero gradient.

    Raises:
        ValueError: If the objective needs a teacher and there is none.
    """
    rows_N, shape = blocks.slot_rows_N, blocks.labels_AS.shape
    labels_N = blocks.labels_AS.flatten().index_select(0, rows_N)
    hidden_NH = hidden_ASH.flatten(0, 1).index_select(0, rows_N)

    def to_slots(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(shape.numel()).index_copy(0, rows_N, values_N).view(shape)

    weights_AS, label_weight = blocks.weights_AS, blocks.label_weight
    if objective.needs_teacher:
        if teacher_NH is None:
            raise ValueError(f"loss type {objective.type} needs the rows of the teacher")
        losses_N, correct_N = distance_rows(hidden_NH, teacher_NH, labels_N, head, objective.type)
    else:
        losses_N, correct_N = cross_entropy_rows(hidden_NH, labels_N, head)
    if objective.type == "dpace":
        weights_AS = dpace_weights(to_slots(losses_N.detach()), blocks.labels_AS >= 0, objective.dpace_alpha)
        label_weight = weights_AS.sum(dtype=torch.float64).item()
    loss_AS = to_slots(losses_N) * weights_AS
    return LossSums(
        weighted_sum=loss_AS.sum(),
        label_weight=label_weight,
        loss_A=loss_AS.detach().sum(dim=1),
        correct_AS=to_slots(correct_N),
        supervised_A=blocks.supervised_A,
    )


def cross_entropy_rows(hidden_NH: Tensor, labels_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of each row against its label, ``CHUNK_ROWS`` rows of logits at a time.

    The gradient of each row is made in the same pass (a row's loss depends on that row alone), so logits are neither
    kept nor made twice. The head is frozen and gets no gradient.

    Args:
        hidden_NH: Rows after the drafter's final norm.
        labels_N: A label for each row.
        head: The target's head.

    Returns:
        Losses, differentiable, in float32 or wider; and whether the first guess equals the label. Shape: (N,) each.
    """
    losses_N, correct_N = _CrossEntropyRows.apply(hidden_NH, labels_N, head)  # type: ignore[no-untyped-call]
    return losses_N, correct_N


class _CrossEntropyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, labels_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        gradient_NH = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        losses_N = torch.empty(len(labels_N), dtype=wide, device=hidden_NH.device)
        correct_N = torch.empty(len(labels_N), dtype=torch.bool, device=hidden_NH.device)
        for first in range(0, len(labels_N), CHUNK_ROWS):
            rows, labels_N1 = slice(first, first + CHUNK_ROWS), labels_N[first : first + CHUNK_ROWS, None]
            logits_NV = head.logits(hidden_NH[rows])
            top_N1, guess_N1 = logits_NV.max(dim=-1, keepdim=True)
            probabilities_NV = logits_NV.softmax(dim=-1)
            # logsumexp without another pass over the vocabulary: the top logit less its log-probability.
            log_sum_N1 = top_N1.to(wide) - probabilities_NV.gather(1, guess_N1).to(wide).log()
            losses_N[rows] = (log_sum_N1 - logits_NV.gather(1, labels_N1))[:, 0]
            correct_N[rows] = (guess_N1 == labels_N1)[:, 0]
            if gradient_NH is not None:
                # By index_put_: scatter_ copies the whole chunk on CPUs.
                chosen = (torch.arange(len(labels_N1), device=labels_N1.device), labels_N1[:, 0])
                # p - 1 from the other probabilities: bfloat16 cannot tell p = 0.999 from 1.
                probabilities_NV[chosen] = 0.0
                probabilities_NV[chosen] = -probabilities_NV.sum(dim=-1, dtype=wide).to(probabilities_NV.dtype)
                gradient_NH[rows] = head.backward(probabilities_NV, logits_NV)
        ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(correct_N)
        return losses_N, correct_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return (gradients[0][:, None] * gradient_NH).to(gradient_NH.dtype), None, None
