"""What a plan holds, in figures: pure functions of the plan and of per-row columns of the index.

``num_tokens`` and ``num_anchors`` are columns over all rows that ``plan.sample_rows`` may name, training or not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_tools.contracts.plan import PACKED_BUCKET_ID, BatchPlan

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Sizes of every batch of a plan. All shapes: (num_batches,). Unit of lengths: tokens.

    Attributes:
        batch_sizes: Samples.
        num_tokens: Real tokens.
        num_padded_tokens: Rows x longest row; a packed batch is one row of ``token_budget``.
        min_tokens: Shortest sample.
        mean_tokens: Mean length of its samples.
        max_tokens: Longest sample.
        num_anchors: Blocks; zeros if the anchors are unknown.
    """

    batch_sizes: Counts
    num_tokens: Counts
    num_padded_tokens: Counts
    min_tokens: Counts
    mean_tokens: Floats
    max_tokens: Counts
    num_anchors: Counts


def batch_figures(plan: BatchPlan, num_tokens: ArrayLike, num_anchors: ArrayLike | None = None) -> BatchFigures:
    """Measure every batch.

    Args:
        plan: The plan; it holds at least one batch.
        num_tokens: Length of every index row. Shape: (num_rows,).
        num_anchors: Blocks of every index row. Shape: (num_rows,).
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)[plan.sample_rows]
    starts, sizes = plan.offsets[:-1], np.diff(plan.offsets)
    totals, longest = np.add.reduceat(lengths, starts), np.maximum.reduceat(lengths, starts)
    packed = plan.bucket_ids == PACKED_BUCKET_ID
    token_budget = plan.settings.get("token_budget", 0) if packed.any() else 0
    return BatchFigures(
        batch_sizes=sizes,
        num_tokens=totals,
        num_padded_tokens=np.where(packed, np.maximum(totals, token_budget), sizes * longest),
        min_tokens=np.minimum.reduceat(lengths, starts),
        mean_tokens=totals / sizes,
        max_tokens=longest,
        num_anchors=np.zeros_like(totals)
        if num_anchors is None
        else np.add.reduceat(np.asarray(num_anchors, dtype=np.int64)[plan.sample_rows], starts),
    )


def padding_efficiency(figures: BatchFigures) -> float:
    """Real tokens / padded tokens, of the whole plan."""
    return float(figures.num_tokens.sum() / figures.num_padded_tokens.sum())


def padding_efficiency_by(groups: NDArray[np.integer], figures: BatchFigures) -> dict[int, float]:
    """Real tokens / padded tokens of each group of batches: pass ``plan.bucket_ids`` or ``plan.steps``."""
    names, inverse = np.unique(groups, return_inverse=True)
    real = np.bincount(inverse, weights=figures.num_tokens)
    padded = np.bincount(inverse, weights=figures.num_padded_tokens)
    return dict(zip(names.tolist(), (real / padded).tolist(), strict=True))


class Neighbours(NamedTuple):
    """Neighbouring batches of one bucket, inside epochs."""

    count: int
    minimum: int  # fewest possible: the sum over epochs of max(0, 2 m - n - 1)


def equal_neighbours(plan: BatchPlan) -> Neighbours:
    """Count neighbouring batches of the same bucket beside the fewest possible for these batches."""
    same = (np.diff(plan.bucket_ids) == 0) & (np.diff(plan.epochs) == 0)
    minimum = 0
    for _, order in _by_epoch(plan):
        most = int(np.unique(order, return_counts=True)[1].max())
        minimum += max(0, 2 * most - len(order) - 1)
    return Neighbours(int(np.count_nonzero(same)), minimum)


def run_lengths(plan: BatchPlan) -> tuple[Counts, Counts]:
    """Find the runs of neighbouring batches of one bucket, inside epochs.

    Returns:
        Bucket of each run and its length, in order. Shapes: (num_runs,).
    """
    new = np.flatnonzero((np.diff(plan.bucket_ids) != 0) | (np.diff(plan.epochs) != 0)) + 1
    starts = np.concatenate([[0], new])
    return plan.bucket_ids[starts].astype(np.int64), np.diff(np.append(starts, len(plan)))


def run_length_histogram(plan: BatchPlan) -> Counts:
    """Count runs by length: entry k is the number of runs of k batches. Shape: (longest run + 1,)."""
    return np.bincount(run_lengths(plan)[1])


def minimal_run_length_histogram(plan: BatchPlan) -> Counts:
    """Count runs by length if every epoch had the fewest equal neighbours, evenly spread. Shape: (longest + 1,)."""
    histogram = np.zeros(2, dtype=np.int64)
    for _, order in _by_epoch(plan):
        most, total = int(np.unique(order, return_counts=True)[1].max()), len(order)
        runs = total - most + 1
        if most <= runs:
            histogram[1] += total
            continue
        short, longer = divmod(most, runs)
        histogram = np.pad(histogram, (0, max(0, short + 2 - len(histogram))))
        histogram[1] += total - most
        histogram[short] += runs - longer
        histogram[short + 1] += longer
    return np.trim_zeros(histogram, "b")


class Transitions(NamedTuple):
    """How often a batch of one bucket is followed by one of another, inside epochs."""

    bucket_ids: Counts  # shape (num_buckets,)
    counts: Counts  # shape (num_buckets, num_buckets): row = bucket, column = the one after it


def transitions(plan: BatchPlan) -> Transitions:
    """Count the transitions between buckets."""
    names, inverse = np.unique(plan.bucket_ids, return_inverse=True)
    inside = np.diff(plan.epochs) == 0
    pairs = inverse[:-1][inside] * len(names) + inverse[1:][inside]
    counts = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), len(names))
    return Transitions(names.astype(np.int64), counts)


def _by_epoch(plan: BatchPlan) -> list[tuple[int, NDArray[np.int32]]]:
    """Bucket ids of every epoch."""
    epochs, starts = np.unique(plan.epochs, return_index=True)
    return list(zip(epochs.tolist(), np.split(plan.bucket_ids, starts[1:]), strict=True))
