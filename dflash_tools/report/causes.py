"""What happened near a reset, and whether it happens there more often than anywhere: data, checkpoint, or order?"""

import math
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.report.columns import numbers
from dflash_tools.report.composition import label_of

# An event counts as near a step that it touches, or that comes at most this many steps after it.
NEAR_STEPS = 2
# A step is stalled when it waits for data this many times as long as a median step takes in all.
STALL = 3.0
# Batches of one bucket in a row that make a long run.
LONG_RUN = 3
SURROUNDING = 3  # batches shown before and after a reset

# Cause -> column of marks on steps.
CAUSES: Mapping[str, str] = {
    "checkpoint": "has_checkpoint",
    "data stall": "is_stalled",
    "resume": "is_resumed",
    "skipped update": "skipped",
    "epoch start": "starts_epoch",
    "long run of a bucket": "is_after_long_run",
}


def mark_events(steps: pl.DataFrame, batches: pl.DataFrame) -> pl.DataFrame:
    """Mark every step at which something happened that could disturb training.

    Args:
        steps: The fields of StepRecord and ``seconds``.
        batches: ``step, bucket_id`` of every batch, in order.
    """
    return steps.with_columns(
        (pl.col("checkpoint_seconds") > 0).alias("has_checkpoint"),
        (pl.col("data_wait_seconds") > STALL * pl.col("seconds").median()).alias("is_stalled"),
        (pl.col("attempt") != pl.col("attempt").shift(1)).fill_null(False).alias("is_resumed"),
        (pl.col("epoch") != pl.col("epoch").shift(1)).fill_null(False).alias("starts_epoch"),
        pl.Series("is_after_long_run", _run_before(steps, batches)[1] >= LONG_RUN),
    )


def run_lengths_so_far(bucket_ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """How many batches of one bucket have come in a row, up to and with each. Shape: (num_batches,)."""
    places = np.arange(len(bucket_ids), dtype=np.int64)
    starts = np.where(np.diff(bucket_ids, prepend=bucket_ids[:1] - 1) != 0, places, 0)
    return places - np.maximum.accumulate(starts) + 1


def _run_before(steps: pl.DataFrame, batches: pl.DataFrame) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Bucket and length of the run of equal buckets that ends just before each step; 0 before the first one."""
    bucket_ids = batches.get_column("bucket_id").to_numpy()
    first = np.searchsorted(batches.get_column("step").to_numpy(), steps.get_column("step").to_numpy())
    lengths = np.where(first > 0, run_lengths_so_far(bucket_ids)[first - 1], 0)
    return bucket_ids[first - 1], lengths


def near_marks(marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Steps that have a mark at themselves or up to ``NEAR_STEPS`` steps before. Shape: (num_steps,)."""
    near = marks.copy()
    for back in range(1, NEAR_STEPS + 1):
        near[back:] |= marks[:-back]
    return near


def _near(steps: pl.DataFrame, cause: str) -> NDArray[np.bool_]:
    marks = steps.get_column(CAUSES[cause]).to_numpy()
    # A run ends where the step begins; only events have an aftermath.
    return marks if cause == "long run of a bucket" else near_marks(marks)


def describe_resets(found: pl.DataFrame, steps: pl.DataFrame, batches: pl.DataFrame) -> pl.DataFrame:
    """Say of each reset how long it lasted, which run of a bucket came before, and which events were near.

    Args:
        found: Result of ``effects.find_resets``.
        steps: Result of ``mark_events``.
        batches: ``step, bucket_id`` of every batch, in order.
    """
    place = np.searchsorted(steps.get_column("step").to_numpy(), found.get_column("first_step").to_numpy())
    bucket_ids, lengths = _run_before(steps, batches)
    near = {cause: _near(steps, cause)[place] for cause in CAUSES}
    names = [", ".join(cause for cause in near if near[cause][row]) or "nothing" for row in range(len(found))]
    return found.with_columns(
        (pl.col("last_step") - pl.col("first_step") + 1).alias("num_steps"),
        pl.Series("bucket_before", [label_of(int(one)) for one in bucket_ids[place]], dtype=pl.String),
        pl.Series("run_before", lengths[place], dtype=pl.Int64),
        pl.Series("near", names, dtype=pl.String),
    )


def cause_frame(resets: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Compare how often each event is near a reset with how often it is near any step.

    ``chance`` is the probability that so many resets or more would be near it if they fell blindly: the upper tail of a
    binomial with the share of steps that are near.
    """
    place = np.searchsorted(steps.get_column("step").to_numpy(), resets.get_column("first_step").to_numpy())
    rows = []
    for cause in CAUSES if len(resets) else ():
        near = _near(steps, cause)
        count, usual = int(near[place].sum()), float(near.mean())
        rows.append(
            {
                "cause": cause,
                "num_resets_near": count,
                "share_of_resets": count / len(resets),
                "share_of_steps": usual,
                "chance": binomial_tail(count, len(resets), usual),
            }
        )
    schema = {
        "cause": pl.String(),
        "num_resets_near": pl.Int64(),
        "share_of_resets": pl.Float64(),
        "share_of_steps": pl.Float64(),
        "chance": pl.Float64(),
    }
    return pl.DataFrame(rows, schema=schema).sort("chance", maintain_order=True)


def binomial_tail(at_least: int, trials: int, probability: float) -> float:
    """Probability of ``at_least`` successes or more."""
    if at_least <= 0:
        return 1.0
    if not 0.0 < probability < 1.0:
        return probability
    log_in, log_out = math.log(probability), math.log1p(-probability)
    logs = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_in + (trials - k) * log_out
        for k in range(at_least, trials + 1)
    ]
    return min(1.0, math.fsum(math.exp(one) for one in logs))


def surroundings(resets: pl.DataFrame, batches: pl.DataFrame) -> pl.DataFrame:
    """The batches of each reset, from a few before its first step to a few after its peak."""
    columns = ["step", "batch", "bucket_id", "batch_size", "min_tokens", "max_tokens", "loss", "bucket_level"]
    steps = numbers(batches, "step")
    first = np.searchsorted(steps, numbers(resets, "first_step"), side="left") - SURROUNDING
    last = np.searchsorted(steps, numbers(resets, "peak_step"), side="right") + SURROUNDING
    pieces = [
        batches.slice(max(int(start), 0), int(end) - max(int(start), 0))
        .select(columns)
        .insert_column(0, pl.lit(number).cast(pl.Int64).alias("reset"))
        for number, (start, end) in enumerate(zip(first, last, strict=True), start=1)
    ]
    empty = batches.clear().select(pl.lit(0).cast(pl.Int64).alias("reset"), *columns)
    return pl.concat([empty, *pieces])
