"""Hard-label cross-entropy of supervised slots, as a sum; the head's logits exist one chunk of rows at a time.

In shapes: A blocks, S slots, N supervised slots, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_tools.drafter.blocks import Blocks
from dflash_tools.drafter.frozen import Head

CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossSums:
    """Sums over the blocks of a batch; adding those of the batches of a step is exact in meaning: nothing is a mean.

    Attributes:
        weighted_sum: Sum of weight x loss over all supervised slots; carries the gradient. float32 scalar.
        label_weight: Sum of the weights.
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


def block_loss(hidden_ASH: Tensor, blocks: Blocks, head: Head) -> LossSums:
    """Sum the weighted cross-entropy of all supervised slots.

    Only supervised slots go through the head, ``CHUNK_ROWS`` at a time; the gradient with respect to the hidden states
    is made in the same pass, so logits are never kept nor made twice. The head is frozen and gets no gradient.

    Args:
        hidden_ASH: What the drafter returns.
        blocks: The blocks it was given.
        head: The target's head.

    Returns:
        The sums; a batch without a supervised slot gives 0 and a zero gradient.
    """
    rows_N = (blocks.labels_AS.flatten() >= 0).nonzero()[:, 0]
    hidden_NH = hidden_ASH.flatten(0, 1).index_select(0, rows_N)
    labels_N = blocks.labels_AS.flatten()[rows_N]
    weights_N = blocks.weights_AS.flatten()[rows_N]
    sums: tuple[Tensor, ...] = _WeightedCrossEntropy.apply(hidden_NH, labels_N, weights_N, head)  # type: ignore[no-untyped-call]
    weighted_sum, losses_N, correct_N = sums
    shape = blocks.labels_AS.shape
    loss_AS = torch.zeros(shape, device=losses_N.device).flatten().index_copy(0, rows_N, losses_N * weights_N)
    correct_AS = torch.zeros(shape, dtype=torch.bool, device=losses_N.device).flatten().index_copy(0, rows_N, correct_N)
    return LossSums(
        weighted_sum=weighted_sum,
        label_weight=blocks.label_weight,
        loss_A=loss_AS.view(shape).sum(dim=1),
        correct_AS=correct_AS.view(shape),
        supervised_A=blocks.supervised_A,
    )


class _WeightedCrossEntropy(torch.autograd.Function):
    """Sum of weight x (logsumexp(logits) - logits[label]), with the gradient made chunk by chunk on the way."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, labels_N: Tensor, weights_N: Tensor, head: Head) -> tuple[Tensor, ...]:
        needs_gradient = hidden_NH.requires_grad
        gradient_NH = torch.empty_like(hidden_NH) if needs_gradient else None
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_NH.device)
        correct_N = torch.empty(len(labels_N), dtype=torch.bool, device=hidden_NH.device)
        for first in range(0, len(labels_N), CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            labels = labels_N[chunk]
            with torch.set_grad_enabled(needs_gradient):
                hidden = hidden_NH[chunk].detach().requires_grad_(needs_gradient)
                logits = head.logits(hidden)
                losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
            losses_N[chunk] = losses.detach()
            correct_N[chunk] = logits.detach().argmax(dim=-1) == labels
            if gradient_NH is not None:
                (gradient_NH[chunk],) = torch.autograd.grad(losses, hidden, weights_N[chunk])
        ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(losses_N, correct_N)
        return (losses_N * weights_N).sum(), losses_N, correct_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return gradients[0].to(gradient_NH.dtype) * gradient_NH, None, None, None
