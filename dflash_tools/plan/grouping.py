"""Which samples of a bucket share a batch: shuffle, sort inside windows, cut all windows in lockstep."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tools.plan.streams import Purpose, random_order

_FEWEST_WINDOWS = 4  # of a bucket, if it has as many batches: keeps repeated pairs of samples near a fifth


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a batch may hold at most.

    Attributes:
        token_budget: Rows x longest row. Unit: tokens.
        anchor_budget: Blocks, or None.
        max_batch_size: Samples.
        sort_window: Batches' worth of samples sorted together.
    """

    token_budget: int
    anchor_budget: int | None
    max_batch_size: int
    sort_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The batches of an epoch, bucket by bucket, in no meaningful order inside a bucket.

    Attributes:
        samples: Positions in the planner's input arrays, batch after batch. Shape: (num_samples,).
        offsets: Batch b holds ``samples[offsets[b]:offsets[b + 1]]``. Shape: (num_batches + 1,).
        bucket_ids: Bucket of each batch, ascending. Shape: (num_batches,).
    """

    samples: NDArray[np.int64]
    offsets: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]


def group_buckets(
    num_tokens: NDArray[np.int64],
    num_anchors: NDArray[np.int64],
    bucket_ids: NDArray[np.int32],
    limits: Limits,
    *,
    seed: int,
    epoch: int,
) -> Groups:
    """Cut every bucket into batches of samples of similar length.

    Samples of a bucket are shuffled and cut into windows of about ``sort_window`` batches; a window is sorted by
    length, longest first, and cut greedily: the first sample of a batch is its longest, so its size follows at once.
    A sample beyond a budget makes a batch alone.

    Args:
        num_tokens: Length of every sample. Shape: (num_samples,). Unit: tokens.
        num_anchors: Blocks of every sample; zeros where no budget is set. Shape: (num_samples,).
        bucket_ids: Bucket of every sample. Shape: (num_samples,).
        limits: Budgets of a batch and the window.
        seed: Seed of the plan.
        epoch: Each epoch has its own composition.
    """
    order = random_order(len(num_tokens), seed=seed, epoch=epoch, purpose=Purpose.COMPOSITION)
    order = order[np.argsort(bucket_ids[order], kind="stable")]
    bounds = _window_bounds(num_tokens[order], num_anchors[order], bucket_ids[order], limits)
    # One sort for all windows: the window in the high bits, the length (longest first) in the low ones.
    window = np.repeat(np.arange(len(bounds) - 1, dtype=np.int64), np.diff(bounds))
    span = int(num_tokens.max()) + 1
    order = order[np.argsort(window * span + (span - 1 - num_tokens[order]), kind="stable")]
    starts = _cut_windows(num_tokens[order], num_anchors[order], bounds, limits)
    return Groups(
        samples=order,
        offsets=np.append(starts, len(order)),
        bucket_ids=bucket_ids[order[starts]],
    )


def _window_bounds(
    num_tokens: NDArray[np.int64], num_anchors: NDArray[np.int64], bucket_ids: NDArray[np.int32], limits: Limits
) -> NDArray[np.int64]:
    """Cut each bucket (arrays sorted by bucket) into windows of equal size. Returns starts and the end."""
    firsts = np.flatnonzero(np.diff(bucket_ids, prepend=bucket_ids[0] - 1))
    ends = np.append(firsts[1:], len(bucket_ids))
    counts = ends - firsts
    # Rows of a typical batch: the budget over the mean length.
    rows = np.minimum(limits.max_batch_size, limits.token_budget * counts // np.add.reduceat(num_tokens, firsts))
    if limits.anchor_budget is not None:
        anchors = np.maximum(np.add.reduceat(num_anchors, firsts), 1)
        rows = np.minimum(rows, limits.anchor_budget * counts // anchors)
    rows = np.maximum(rows, 1)
    # A small bucket has shorter windows: in a single one every epoch would cut the same batches again.
    batches = (counts + rows - 1) // rows
    windows = np.maximum(batches // limits.sort_window, np.minimum(batches, _FEWEST_WINDOWS))
    pieces = [
        first + np.arange(number, dtype=np.int64) * count // number
        for first, count, number in zip(firsts, counts, windows, strict=True)
    ]
    return np.append(np.concatenate(pieces), len(bucket_ids))


def _cut_windows(
    num_tokens: NDArray[np.int64], num_anchors: NDArray[np.int64], bounds: NDArray[np.int64], limits: Limits
) -> NDArray[np.int64]:
    """Cut sorted windows into batches; round k cuts the k-th batch of every window. Returns the starts, ascending."""
    anchors_before = np.concatenate([[0], np.cumsum(num_anchors)])
    start, end = bounds[:-1], bounds[1:]
    starts = []
    while len(start):
        starts.append(start)
        left = end - start
        most = np.clip(limits.token_budget // num_tokens[start], 1, limits.max_batch_size)
        if limits.anchor_budget is not None:
            reach = np.searchsorted(anchors_before, anchors_before[start] + limits.anchor_budget, side="right") - 1
            most = np.clip(reach - start, 1, most)
        # The last two batches of a window share what is left evenly, so that no batch is a mere crumb.
        size = np.where(left <= most, left, np.where(left < 2 * most, (left + 1) // 2, most))
        start = start + size
        unfinished = start < end
        start, end = start[unfinished], end[unfinished]
    return np.sort(np.concatenate(starts))
