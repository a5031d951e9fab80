"""Losses against the target's own distribution, from its kept last hidden state.

The teacher of slot k is the target's distribution at position anchor + k - 1: the one that predicts the token at
anchor + k. In shapes: T tokens, N supervised slots, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_tools.drafter.blocks import Blocks, Context
from dflash_tools.drafter.frozen import FrozenTarget, Head
from dflash_tools.errors import StoreError

# Several float32 tensors of these rows times the vocabulary live at once.
CHUNK_ROWS = 128

# From log-probabilities of teacher and drafter, both (N, V): each row's loss and its gradient by the drafter's logits.
RowLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def teacher_rows(
    last_hidden_TH: Tensor, context: Context, blocks: Blocks, frozen: FrozenTarget, *, normed: bool
) -> Tensor:
    """Pick what the target's head reads for each supervised slot.

    Args:
        last_hidden_TH: Output of the target's last decoder layer, on the token axis of the context.
        context: Documents of the batch.
        blocks: Blocks of the batch.
        frozen: The target's frozen parts.
        normed: Whether the states are after the final norm.

    Returns:
        Rows in the order of the supervised slots. Shape: (N, H).

    Raises:
        StoreError: If the final norm has to be applied and is no RMS norm.
    """
    starts = torch.tensor(context.offsets, device=blocks.anchors_A.device)[blocks.document_ids_A]
    before_AS = starts[:, None] + blocks.positions_AS - 1
    rows_NH = last_hidden_TH.index_select(0, before_AS.flatten().index_select(0, blocks.slot_rows_N))
    if normed:
        return rows_NH
    if frozen.norm_eps is None or frozen.norm_bias:
        raise StoreError(
            "the target's final norm is not an RMS norm, so its distribution cannot be made from the kept states; "
            'use loss.type = "ce" or "dpace"'
        )
    return F.rms_norm(rows_NH.float(), frozen.norm_H.shape, frozen.norm_H.float(), frozen.norm_eps).to(rows_NH.dtype)


def distance_rows(
    hidden_NH: Tensor, teacher_NH: Tensor, labels_N: Tensor, head: Head, distance: str
) -> tuple[Tensor, Tensor]:
    """Compute each row's distance from the teacher's distribution, ``CHUNK_ROWS`` rows of logits at a time.

    Args:
        hidden_NH: Rows after the drafter's final norm.
        teacher_NH: What the target's head reads; no gradient.
        labels_N: Tokens of the text, only to count right guesses.
        head: The target's head, used for both.
        distance: A key of ``ROW_LOSSES``.

    Returns:
        Losses, differentiable, in float32 or wider; and whether the first guess equals the label. Shape: (N,) each.
    """
    row_loss = ROW_LOSSES[distance]
    losses_N, correct_N = _DistanceRows.apply(hidden_NH, teacher_NH, labels_N, head, row_loss)  # type: ignore[no-untyped-call]
    return losses_N, correct_N


class _DistanceRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, teacher_NH: Tensor, labels_N: Tensor, head: Head, row_loss: RowLoss
    ) -> tuple[Tensor, Tensor]:
        gradient_NH = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        losses_N = torch.empty(len(hidden_NH), dtype=wide, device=hidden_NH.device)
        correct_N = torch.empty(len(hidden_NH), dtype=torch.bool, device=hidden_NH.device)
        for first in range(0, len(hidden_NH), CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            logits_NV = head.logits(hidden_NH[rows])
            teacher_NV = head.logits(teacher_NH[rows]).log_softmax(dim=-1, dtype=wide)
            losses_N[rows], slopes_NV = row_loss(teacher_NV, logits_NV.log_softmax(dim=-1, dtype=wide))
            correct_N[rows] = logits_NV.argmax(dim=-1) == labels_N[rows]
            if gradient_NH is not None:
                gradient_NH[rows] = head.backward(slopes_NV.to(logits_NV.dtype), logits_NV)
        ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(correct_N)
        return losses_N, correct_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return (gradients[0][:, None] * gradient_NH).to(gradient_NH.dtype), None, None, None, None


def _kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q); the slope is q - p."""
    p, q = log_p.exp(), log_q.exp()
    # Where p underflows to 0 its logarithm is still finite, so the product is 0 and not NaN.
    return (p * (log_p - log_q)).sum(dim=-1), q - p


def _total_variation(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Half the L1 distance, which is 1 - acceptance probability; through q = softmax the slope is q (s - sum q s)."""
    p, q = log_p.exp(), log_q.exp()
    half_sign = (q - p).sign() / 2
    slopes = q * (half_sign - (q * half_sign).sum(dim=-1, keepdim=True))
    return (q - p).abs().sum(dim=-1) / 2, slopes


def _acceptance(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-log of the acceptance probability sum min(p, q)."""
    _, slopes = _total_variation(log_p, log_q)
    # Summed by itself: one minus the distance would lose a small acceptance to rounding.
    acceptance = torch.minimum(log_p, log_q).exp().sum(dim=-1)
    return -acceptance.log(), slopes / acceptance[:, None]


def _hybrid(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL where little would be accepted, total variation where much would: the share exp(-3 acceptance) is detached."""
    divergence, divergence_slopes = _kl(log_p, log_q)
    distance, distance_slopes = _total_variation(log_p, log_q)
    share = torch.exp(-3 * (1 - distance))
    losses = share * divergence + (1 - share) * distance
    return losses, share[:, None] * divergence_slopes + (1 - share[:, None]) * distance_slopes


ROW_LOSSES: dict[str, RowLoss] = {
    "kd": _kl,
    "tv": _total_variation,
    "lk": _acceptance,
    "lk_hybrid": _hybrid,
}
