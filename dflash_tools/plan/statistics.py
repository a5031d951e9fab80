"""How a plan, or a log of what was trained, mixes its buckets: figures over columns of batches in order.

Every function takes columns of one entry per batch, so that a plan and a run log are measured alike. Neighbours, runs,
transitions and lags never cross an epoch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_tools.contracts.plan import PACKED_BUCKET_ID, BatchPlan

Ids = NDArray[np.integer]
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLengths:
    """Sizes of every batch of a plan. Shape of each: (num_batches,). Unit of lengths: tokens.

    Attributes:
        num_samples: Samples.
        min_tokens: Shortest sample.
        max_tokens: Longest sample.
        num_tokens: Real tokens.
        num_padded_tokens: Padding included: rows x longest row; a packed batch is one row of ``token_budget``.
    """

    num_samples: Counts
    min_tokens: Counts
    max_tokens: Counts
    num_tokens: Counts
    num_padded_tokens: Counts


def batch_lengths(plan: BatchPlan, num_tokens: ArrayLike) -> BatchLengths:
    """Measure every batch of a plan.

    Args:
        plan: The plan.
        num_tokens: Length of every row of the index (or of the joined indexes), training or not. Shape: (num_rows,).
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)[plan.sample_rows]
    if len(plan) == 0:
        return BatchLengths(**dict.fromkeys(BatchLengths.__dataclass_fields__, np.zeros(0, dtype=np.int64)))
    starts, sizes = plan.offsets[:-1], np.diff(plan.offsets)
    totals, longest = np.add.reduceat(lengths, starts), np.maximum.reduceat(lengths, starts)
    return BatchLengths(
        num_samples=sizes,
        min_tokens=np.minimum.reduceat(lengths, starts),
        max_tokens=longest,
        num_tokens=totals,
        num_padded_tokens=np.where(
            plan.bucket_ids == PACKED_BUCKET_ID,
            np.maximum(totals, int(plan.settings.get("token_budget", 0))),
            sizes * longest,
        ),
    )


def count_equal_neighbours(bucket_ids: Ids, epochs: Ids) -> int:
    """Count neighbouring batches of the same bucket."""
    return int(np.count_nonzero((np.diff(bucket_ids) == 0) & (np.diff(epochs) == 0)))


def fewest_equal_neighbours(bucket_ids: Ids, epochs: Ids) -> int:
    """Find the fewest equal neighbours that any order of these batches has.

    Of n batches of an epoch, m of them in its largest bucket, the n - m others part it into at most n - m + 1 runs: at
    least max(0, 2 m - n - 1) of its batches follow one another.
    """
    return sum(max(0, 2 * int(counts.max()) - int(counts.sum()) - 1) for counts in _counts_by_epoch(bucket_ids, epochs))


def find_runs(bucket_ids: Ids, epochs: Ids) -> tuple[Counts, Counts]:
    """Find the runs of neighbouring batches of one bucket.

    Returns:
        Bucket of each run, and its length. Shapes: (num_runs,). Unit of lengths: batches.
    """
    if len(bucket_ids) == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(bucket_ids) != 0) | (np.diff(epochs) != 0)) + 1
    starts = np.concatenate([[0], breaks])
    return np.asarray(bucket_ids)[starts].astype(np.int64), np.diff(np.append(starts, len(bucket_ids)))


def fewest_long_runs(bucket_ids: Ids, epochs: Ids) -> Counts:
    """Count runs by length in an order with the fewest equal neighbours, evenly spread.

    Returns:
        Entry k: number of runs of k batches. Shape: (longest run + 1,).
    """
    lengths: dict[int, int] = {}
    for counts in _counts_by_epoch(bucket_ids, epochs):
        total, most = int(counts.sum()), int(counts.max())
        num_runs = min(total - most + 1, most)
        short, longer = divmod(most, num_runs)
        for length, number in ((1, total - most), (short, num_runs - longer), (short + 1, longer)):
            lengths[length] = lengths.get(length, 0) + number
    histogram = np.zeros(max((k for k, number in lengths.items() if number), default=0) + 1, dtype=np.int64)
    for length, number in lengths.items():
        if number:
            histogram[length] = number
    return histogram


def count_transitions(bucket_ids: Ids, epochs: Ids) -> tuple[Counts, Counts]:
    """Count how often a batch of one bucket is followed by one of another.

    Returns:
        Bucket ids, ascending, and the counts: row = bucket, column = the next one. Shapes: (n,) and (n, n).
    """
    ids, inverse = np.unique(bucket_ids, return_inverse=True)
    inside = np.diff(epochs) == 0
    pairs = inverse[:-1][inside] * len(ids) + inverse[1:][inside]
    return ids.astype(np.int64), np.bincount(pairs, minlength=len(ids) ** 2).reshape(len(ids), len(ids))


def lag_correlations(values: NDArray[np.number], epochs: Ids, max_lag: int = 10) -> Floats:
    """Correlate a column with itself k batches later, for k = 1 .. max_lag.

    Pairs lie inside an epoch; mean and variance are those of the whole column.

    Returns:
        Correlations, lag 1 first; NaN where there is no pair or the column is constant. Shape: (max_lag,).
    """
    centred = np.asarray(values, dtype=np.float64)
    centred = centred - centred.mean() if len(centred) else centred
    variance = float(np.mean(centred**2)) if len(centred) else 0.0
    correlations = np.full(max_lag, np.nan)
    for lag in range(1, max_lag + 1):
        inside = np.asarray(epochs[lag:]) == np.asarray(epochs[:-lag])
        if variance > 0 and inside.any():
            correlations[lag - 1] = np.mean((centred[lag:] * centred[:-lag])[inside]) / variance
    return correlations


def rule_alone_correlations(values: NDArray[np.number], bucket_ids: Ids, epochs: Ids, max_lag: int = 10) -> Floats:
    """Find the lag correlations of an order that only avoids equal neighbours and is random otherwise.

    Consecutive buckets a, b then come with probability x_a x_b (a != b), where x is such that every bucket keeps its
    share; a bucket of more than half follows itself as often as it must. The means of the buckets times the powers of
    that chain give the correlation. Without the rule all of them would be zero.

    Returns:
        Correlations, lag 1 first; NaN where the column is constant. Shape: (max_lag,).
    """
    column = np.asarray(values, dtype=np.float64)
    variance = float(np.var(column)) if len(column) else 0.0
    if variance == 0:
        return np.full(max_lag, np.nan)
    _, inverse, counts = np.unique(bucket_ids, return_inverse=True, return_counts=True)
    shares = counts / len(column)
    means = np.bincount(inverse, weights=column - column.mean()) / counts
    chain = _chain_without_repeats(shares)
    correlations = np.empty(max_lag)
    ahead = means
    for lag in range(max_lag):
        ahead = chain @ ahead
        correlations[lag] = np.sum(shares * means * ahead) / variance
    return correlations


def shares_by_tenth(bucket_ids: Ids, epochs: Ids) -> tuple[Counts, Floats]:
    """Find the share of each bucket among the batches of each tenth of an epoch, averaged over epochs.

    Returns:
        Bucket ids, ascending, and the shares. Shapes: (n,) and (10, n). A tenth without a batch has NaN.
    """
    ids, inverse = np.unique(bucket_ids, return_inverse=True)
    _, epoch, sizes = np.unique(epochs, return_inverse=True, return_counts=True)
    place = np.arange(len(inverse)) - (np.cumsum(sizes) - sizes)[epoch]
    tenth = place * 10 // sizes[epoch]
    cells = (epoch * 10 + tenth) * len(ids) + inverse
    counts = np.bincount(cells, minlength=len(sizes) * 10 * len(ids)).reshape(len(sizes), 10, len(ids))
    totals = counts.sum(axis=2, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    filled = (totals > 0).sum(axis=0)
    return ids.astype(np.int64), np.where(filled > 0, shares.sum(axis=0) / np.maximum(filled, 1), np.nan)


def entropy_by_step(bucket_ids: Ids, steps: Ids) -> Floats:
    """Find the entropy of the buckets of every step. Unit: bits. Shape: (num_steps,)."""
    ids, inverse = np.unique(bucket_ids, return_inverse=True)
    _, step = np.unique(steps, return_inverse=True)
    num_steps = int(step[-1]) + 1 if len(step) else 0
    counts = np.bincount(step * len(ids) + inverse, minlength=num_steps * len(ids)).reshape(num_steps, len(ids))
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: Floats = -(shares * logs).sum(axis=1) + 0.0  # no -0.0
    return entropy


def depletion(bucket_ids: Ids, epochs: Ids) -> tuple[Counts, Floats]:
    """Find how far into its epoch the last batch of each bucket comes, at the earliest over epochs.

    Returns:
        Bucket ids, ascending, and the share of the epoch's batches up to that batch. Shapes: (n,).
    """
    ids, inverse = np.unique(bucket_ids, return_inverse=True)
    earliest = np.ones(len(ids))
    for epoch in np.unique(epochs):
        buckets = inverse[np.asarray(epochs) == epoch]
        last = np.full(len(ids), -1, dtype=np.int64)
        last[buckets] = np.arange(len(buckets))  # of several entries for one bucket the last one stays
        present = last >= 0
        earliest[present] = np.minimum(earliest[present], (last[present] + 1) / len(buckets))
    return ids.astype(np.int64), earliest


def _counts_by_epoch(bucket_ids: Ids, epochs: Ids) -> list[Counts]:
    """Batches of each bucket that occurs, for every epoch."""
    edges = np.flatnonzero(np.diff(epochs)) + 1
    parts = np.split(np.asarray(bucket_ids), edges)
    return [np.unique(part, return_counts=True)[1] for part in parts if len(part)]


def _chain_without_repeats(shares: Floats) -> Floats:
    """Transition probabilities that keep the shares and avoid repeats: symmetric scaling of ones off the diagonal."""
    if len(shares) == 1:
        return np.ones((1, 1))
    majority = int(np.argmax(shares))
    if shares[majority] >= 0.5:
        # All others lie between two batches of the majority.
        chain = np.zeros((len(shares), len(shares)))
        chain[:, majority] = 1.0
        chain[majority] = shares / shares[majority]
        chain[majority, majority] = 2 - 1 / shares[majority]
        return chain
    weights = np.sqrt(shares)
    for _ in range(1000):
        flow = weights * (weights.sum() - weights)
        weights = weights * np.sqrt(shares / flow)
    joint = np.outer(weights, weights)
    np.fill_diagonal(joint, 0.0)
    rest: Floats = joint / joint.sum(axis=1, keepdims=True)
    return rest
