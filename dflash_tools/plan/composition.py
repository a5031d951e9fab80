"""Which samples meet in a batch, what limits it, and what a token counts: figures over a plan and the index."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_tools.contracts.plan import PACKED_BUCKET_ID, BatchPlan
from dflash_tools.plan.statistics import batch_lengths

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def repeated_pairs(plan: BatchPlan) -> Floats:
    """Find, for each epoch but the last, the share of its pairs of batch mates that share a batch again in the next.

    Returns:
        One share per pair of epochs; NaN where no two samples share a batch. Shape: (num_epochs - 1,).
    """
    epochs = np.unique(plan.epochs)
    batch = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))
    of_epoch = [_batch_of_row(plan, batch, int(epoch)) for epoch in epochs]
    shares = np.full(max(len(epochs) - 1, 0), np.nan)
    for place, (now, after) in enumerate(pairwise(of_epoch)):
        pairs = _pairs(now[now >= 0])
        both = (now >= 0) & (after >= 0)
        if pairs:
            shares[place] = _pairs(now[both] * len(plan) + after[both]) / pairs
    return shares


class Shares(NamedTuple):
    """A figure of every bucket."""

    bucket_ids: Counts  # ascending
    values: Floats


def effective_weights(bucket_ids: ArrayLike, num_anchors: ArrayLike, num_supervised_tokens: ArrayLike) -> Shares:
    """Find how much a supervised token of each bucket counts beside one of the whole plan.

    A token is trained on as often as blocks cover it, so its weight is blocks / supervised tokens. Where
    ``num_anchors`` caps long samples, their tokens count less than 1; ``anchor_rule = "proportional"`` evens that out.

    Args:
        bucket_ids: Bucket of every training sample. Shape: (num_samples,).
        num_anchors: Blocks of every training sample. Shape: (num_samples,).
        num_supervised_tokens: Supervised tokens of every training sample. Shape: (num_samples,).
    """
    ids, inverse = np.unique(np.asarray(bucket_ids), return_inverse=True)
    anchors = np.bincount(inverse, weights=np.asarray(num_anchors))
    tokens = np.bincount(inverse, weights=np.asarray(num_supervised_tokens))
    with np.errstate(invalid="ignore", divide="ignore"):
        return Shares(ids.astype(np.int64), anchors / tokens * (tokens.sum() / anchors.sum()))


def slot_efficiency(
    num_anchors: ArrayLike, num_valid_anchors: ArrayLike, num_supervised_tokens: ArrayLike, block_size: int
) -> Floats:
    """Estimate the share of drafted slots that carry a label, from the index alone.

    Blocks are never padded, but a block near the end of a turn runs past it. A run of s supervised tokens has s - 1
    valid anchors, so a sample has num_supervised_tokens - num_valid_anchors runs; taken as equally long, an anchor with
    d supervised tokens after it fills min(d, block_size - 1) slots, d = 1 .. s - 1, each as likely.

    Returns:
        Filled slots / slots of every sample; NaN without anchors. Shape: (num_samples,). A lower bound for runs of
        unequal length: filled slots of a run are convex in its length.
    """
    valid = np.asarray(num_valid_anchors, dtype=np.float64)
    runs = np.asarray(num_supervised_tokens, dtype=np.float64) - valid
    slots = block_size - 1
    with np.errstate(invalid="ignore", divide="ignore"):
        reach = valid / runs  # largest d of a run
        short = np.minimum(reach, slots)
        filled = (short * (short + 1) / 2 + (reach - short) * slots) / (reach * slots)
    return np.where(np.asarray(num_anchors) > 0, filled, np.nan)


class Limit(NamedTuple):
    """How often each limit ended a batch of a bucket."""

    bucket_id: int
    num_batches: int
    mean_batch_size: float
    by_tokens: int  # one more sample of the batch's longest length would pass token_budget
    by_anchors: int  # one more sample of the batch's mean anchors would pass anchor_budget
    by_batch_size: int  # max_batch_size reached
    by_window: int  # none of these: the batches at the end of a window


def binding_limits(plan: BatchPlan, num_tokens: ArrayLike, num_anchors: ArrayLike | None = None) -> list[Limit]:
    """Find which limit ends the batches of each bucket; of several that bind, the first named in ``Limit`` counts.

    Args:
        plan: The plan.
        num_tokens: Length of every row of the index. Shape: (num_rows,).
        num_anchors: Blocks of every row of the index. Shape: (num_rows,).
    """
    if len(plan) == 0:
        return []
    lengths = batch_lengths(plan, num_tokens)
    sizes, settings = lengths.num_samples, plan.settings
    width = lengths.num_padded_tokens // sizes
    packed = plan.bucket_ids == PACKED_BUCKET_ID
    tokens = packed | ((sizes + 1) * width > settings["token_budget"])
    anchors = np.zeros_like(tokens)
    if num_anchors is not None and settings["anchor_budget"] is not None:
        total = np.add.reduceat(np.asarray(num_anchors, dtype=np.int64)[plan.sample_rows], plan.offsets[:-1])
        anchors = ~tokens & (total * (sizes + 1) > settings["anchor_budget"] * sizes)
    rows = ~tokens & ~anchors & (sizes >= settings["max_batch_size"])
    limits = []
    for bucket_id in np.unique(plan.bucket_ids).tolist():
        of_bucket = plan.bucket_ids == bucket_id
        by_tokens, by_anchors, by_rows = (int((of_bucket & flag).sum()) for flag in (tokens, anchors, rows))
        limits.append(
            Limit(
                bucket_id=bucket_id,
                num_batches=int(of_bucket.sum()),
                mean_batch_size=float(sizes[of_bucket].mean()),
                by_tokens=by_tokens,
                by_anchors=by_anchors,
                by_batch_size=by_rows,
                by_window=int(of_bucket.sum()) - by_tokens - by_anchors - by_rows,
            )
        )
    return limits


def _batch_of_row(plan: BatchPlan, batch: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    """Batch of every row of the index in one epoch; -1 where the row is in none."""
    inside = plan.epochs[batch] == epoch
    rows = np.full(int(plan.sample_rows.max()) + 1, -1, dtype=np.int64)
    rows[plan.sample_rows[inside]] = batch[inside]
    return rows


def _pairs(groups: NDArray[np.int64]) -> int:
    counts = np.unique(groups, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
