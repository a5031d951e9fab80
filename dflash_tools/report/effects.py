"""How much of a curve the buckets explain, and what remains: pure functions over frames of a run.

Batches of other lengths draw a sawtooth even when the weights are fine; only what remains after the bucket's own level
is taken off can be harm.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Batches that a running level is the median of, and how many it needs first.
LEVEL_WINDOW = 32
LEVEL_NEEDS = 8
# Trend and levels are found in turns: each is read off what the other leaves. A few turns settle.
BACKFITS = 3
# A jump counts as a reset when it is this many robust deviations and this share of the loss above the level.
RESET_DEVIATIONS = 8.0
RESET_SHARE = 0.05
# Jumps no further apart than this belong to one reset. Unit: steps.
RESET_GAP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Share of a variance that groups explain (eta squared), beside what chance alone would explain.

    Attributes:
        eta_squared: Between-group sum of squares / total sum of squares; NaN if nothing varies.
        eta_squared_by_chance: Expectation for groups that do not matter: (num_groups - 1) / (num_values - 1).
    """

    eta_squared: float
    eta_squared_by_chance: float

    @property
    def excess(self) -> float:
        """What is left after chance; 0 if undefined."""
        value = self.eta_squared - self.eta_squared_by_chance
        return value if np.isfinite(value) else 0.0


def explained_by_groups(values: NDArray[np.float64], groups: NDArray[np.integer]) -> Explained:
    """Eta squared of one-way groups; values that are not finite are left out.

    Args:
        values: Shape: (num_values,).
        groups: Group of each value. Shape: (num_values,).
    """
    finite = np.isfinite(values)
    values, groups = values[finite], np.unique(groups[finite], return_inverse=True)[1]
    if len(values) < 3:
        return Explained(eta_squared=float("nan"), eta_squared_by_chance=float("nan"))
    counts = np.bincount(groups)
    means = np.bincount(groups, weights=values) / counts
    return _explained(values, means[groups], len(counts))


def explained_by_shares(values: NDArray[np.float64], shares: NDArray[np.float64]) -> Explained:
    """Share of the variance of steps that their composition explains: R squared of least squares on bucket shares.

    With one batch a step the shares are indicators and this is eta squared.

    Args:
        values: One a step. Shape: (num_steps,).
        shares: Share of each bucket in each step; rows sum to 1. Shape: (num_steps, num_buckets).
    """
    finite = np.isfinite(values)
    values, shares = values[finite], shares[finite]
    rank = int(np.linalg.matrix_rank(shares)) if len(values) else 0
    if len(values) < rank + 2:
        return Explained(eta_squared=float("nan"), eta_squared_by_chance=float("nan"))
    # Rows of shares sum to 1, so the constant is already among their combinations.
    weights = np.linalg.lstsq(shares, values, rcond=None)[0]
    return _explained(values, shares @ weights, rank)


def _explained(values: NDArray[np.float64], fitted: NDArray[np.float64], num_groups: int) -> Explained:
    total = float(((values - values.mean()) ** 2).sum())
    between = float(((fitted - values.mean()) ** 2).sum())
    return Explained(
        eta_squared=between / total if total > 0 else float("nan"),
        eta_squared_by_chance=(num_groups - 1) / (len(values) - 1),
    )


def around_trend(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Take the centred running mean off a curve, so that the descent of training does not count as variance."""
    series = pl.Series(values).fill_nan(None)
    trend = series.rolling_mean(window, min_samples=1, center=True)
    return (series - trend).fill_null(float("nan")).to_numpy()


def trend_window(num_values: int) -> int:
    """Length of the running mean: a twentieth of the curve, 16 to 512 values."""
    return int(np.clip(num_values // 20, 16, 512))


def adjust_batches(batches: pl.DataFrame) -> pl.DataFrame:
    """Add what of each batch's loss its bucket does not explain.

    ``adjusted_loss`` = loss - how far the bucket lies above or below the trend of all batches (a running median over
    the bucket's own batches, so that a bucket's level may move with training). ``residual`` = adjusted loss - its
    running median over the batches before, blind to the batch itself; null for the first few. ``bucket_level`` =
    loss - residual: the loss that a batch of this bucket was to be expected to have here.

    Args:
        batches: Columns ``batch, step, bucket_id, loss, label_weight``, in order.
    """
    frame = batches.with_columns(pl.when(pl.col("label_weight") > 0).then(pl.col("loss").fill_nan(None)).alias("_loss"))
    frame = frame.with_columns(pl.col("_loss").alias("adjusted_loss"))
    for _ in range(BACKFITS):
        # The trend is one of all batches, so it must stand as a column before anything is taken over a bucket.
        trend = pl.col("adjusted_loss").rolling_mean(trend_window(len(batches)), min_samples=1, center=True)
        frame = frame.with_columns((pl.col("_loss") - trend).alias("_off_trend"))
        offset = pl.col("_off_trend").rolling_median(LEVEL_WINDOW + 1, min_samples=1, center=True).over("bucket_id")
        frame = frame.with_columns((pl.col("_loss") - offset).alias("adjusted_loss"))
    before = pl.col("adjusted_loss").shift(1).rolling_median(LEVEL_WINDOW, min_samples=LEVEL_NEEDS)
    return (
        frame.with_columns((pl.col("adjusted_loss") - before).alias("residual"))
        .with_columns((pl.col("_loss") - pl.col("residual")).alias("bucket_level"))
        .drop("_loss", "_off_trend")
    )


def adjust_steps(batches: pl.DataFrame) -> pl.DataFrame:
    """Average adjusted loss and residual of every step's batches by label weight.

    Args:
        batches: Result of ``adjust_batches``.

    Returns:
        ``step, adjusted_loss, residual``; null where no batch of the step has one.
    """

    def mean(column: str) -> pl.Expr:
        known = pl.col(column).is_not_null()
        weight = pl.col("label_weight").filter(known)
        return ((pl.col(column).filter(known) * weight).sum() / weight.sum()).fill_nan(None).alias(column)

    return batches.group_by("step", maintain_order=True).agg(mean("adjusted_loss"), mean("residual"))


def find_resets(steps: NDArray[np.int64], residuals: NDArray[np.float64], losses: NDArray[np.float64]) -> pl.DataFrame:
    """Find loss jumps that the buckets do not explain.

    A step counts when its residual is ``RESET_DEVIATIONS`` robust standard deviations (1.4826 x median absolute
    deviation over the whole run) and ``RESET_SHARE`` of the loss above the level; steps at most ``RESET_GAP`` apart
    make one reset.

    Args:
        steps: Ascending. Shape: (num_steps,).
        residuals: Loss above the buckets' levels; NaN where unknown. Shape: (num_steps,).
        losses: Loss of the step. Shape: (num_steps,).

    Returns:
        One row a reset: ``first_step, last_step, peak_step, rise, loss_before, loss_at_peak``.
    """
    known = np.isfinite(residuals)
    center = float(np.median(residuals[known])) if known.any() else 0.0
    deviation = 1.4826 * float(np.median(np.abs(residuals[known] - center))) if known.any() else 0.0
    height = np.where(known, residuals - center, 0.0)
    level = np.where(np.isfinite(losses), losses - height, np.inf)
    jumps = np.flatnonzero((height > RESET_DEVIATIONS * deviation) & (height > RESET_SHARE * np.abs(level)))
    pieces = np.split(jumps, np.flatnonzero(np.diff(steps[jumps]) > RESET_GAP) + 1) if len(jumps) else []
    peaks = np.array([piece[np.argmax(height[piece])] for piece in pieces], dtype=np.int64)
    return pl.DataFrame(
        {
            "first_step": steps[[piece[0] for piece in pieces]] if pieces else np.zeros(0, np.int64),
            "last_step": steps[[piece[-1] for piece in pieces]] if pieces else np.zeros(0, np.int64),
            "peak_step": steps[peaks],
            "rise": height[peaks],
            "loss_before": (losses - height)[peaks],
            "loss_at_peak": losses[peaks],
        }
    )


def step_shares(batches: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Share of each bucket among the batches of every step.

    Returns:
        Steps, ascending, and shares. Shapes: (num_steps,), (num_steps, num_buckets).
    """
    steps, place = np.unique(batches.get_column("step").to_numpy(), return_inverse=True)
    ids, column = np.unique(batches.get_column("bucket_id").to_numpy(), return_inverse=True)
    counts = np.zeros((len(steps), len(ids)))
    np.add.at(counts, (place, column), 1.0)
    return steps, counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
