"""What batches hold, as frames: one row a batch, from a plan or from the run log, with the same columns.

Columns of a frame of batches: ``batch, epoch, step, bucket_id, batch_size, min_tokens, mean_tokens, max_tokens,
num_tokens, num_padded_tokens, num_supervised_tokens, num_anchors``, in the order of training.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.contracts.plan import PACKED_BUCKET_ID, BatchPlan
from dflash_tools.plan import statistics
from dflash_tools.report.columns import total_of
from dflash_tools.report.document import share_of

MAX_LAG = 10
TENTHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """What the planner knew of every index row. Shape of each: (num_rows,)."""

    num_tokens: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    num_supervised_tokens: NDArray[np.int64]
    num_valid_anchors: NDArray[np.int64]
    num_anchors: NDArray[np.int64]  # blocks of a sample in an epoch


def frame_of_plan(plan: BatchPlan, samples: SampleColumns) -> pl.DataFrame:
    """Describe every batch of a plan from the index alone."""
    lengths = statistics.batch_lengths(plan, samples.num_tokens)
    starts = plan.offsets[:-1]

    def total(column: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.add.reduceat(column[plan.sample_rows], starts) if len(plan) else np.zeros(0, np.int64)

    return pl.DataFrame(
        {
            "batch": np.arange(len(plan), dtype=np.int64),
            "epoch": plan.epochs,
            "step": plan.steps,
            "bucket_id": plan.bucket_ids,
            "batch_size": lengths.num_samples,
            "min_tokens": lengths.min_tokens,
            "mean_tokens": lengths.num_tokens / lengths.num_samples,
            "max_tokens": lengths.max_tokens,
            "num_tokens": lengths.num_tokens,
            "num_padded_tokens": lengths.num_padded_tokens,
            "num_supervised_tokens": total(samples.num_supervised_tokens),
            "num_anchors": total(samples.num_anchors),
        }
    )


def padding_efficiency(batches: pl.DataFrame) -> float:
    """Real tokens / padded tokens, a ratio of sums."""
    return share_of(total_of(batches, "num_tokens"), total_of(batches, "num_padded_tokens"))


def bucket_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """One row a bucket: lengths, batches, and its share of samples, tokens, supervised tokens, anchors and batches."""
    first_epoch = pl.col("epoch") == pl.col("epoch").min()
    return (
        batches.with_columns(first_epoch.alias("is_first_epoch"))
        .group_by("bucket_id")
        .agg(
            pl.col("min_tokens").min(),
            pl.col("max_tokens").max(),
            pl.col("batch_size").filter("is_first_epoch").sum().alias("samples_per_epoch"),
            pl.len().cast(pl.Int64).alias("num_batches"),
            pl.len().alias("share_of_batches"),
            pl.col("batch_size").sum().alias("share_of_samples"),
            pl.col("num_tokens").sum().alias("share_of_tokens"),
            pl.col("num_supervised_tokens").sum().alias("share_of_supervised_tokens"),
            pl.col("num_anchors").sum().alias("share_of_anchors"),
            pl.col("batch_size").mean().alias("mean_batch_size"),
            (pl.col("num_tokens").sum() / pl.col("num_padded_tokens").sum()).alias("padding_efficiency"),
        )
        .sort("bucket_id")
        .with_columns(pl.col("^share_of_.*$") / pl.col("^share_of_.*$").sum())
    )


def label_of(bucket_id: int) -> str:
    """A bucket's name in charts."""
    return "packed" if bucket_id == PACKED_BUCKET_ID else f"bucket {bucket_id}"


def with_labels(frame: pl.DataFrame) -> pl.DataFrame:
    """Add column ``bucket``, the name of ``bucket_id``."""
    ids = frame.get_column("bucket_id").unique().to_list()
    return frame.with_columns(
        pl.col("bucket_id").replace_strict(ids, [label_of(one) for one in ids], return_dtype=pl.String).alias("bucket")
    )


def order_columns(batches: pl.DataFrame) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Bucket and epoch of every batch, in order. Shape of each: (num_batches,)."""
    return batches.get_column("bucket_id").to_numpy(), batches.get_column("epoch").to_numpy()


def run_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """How often each length of a run of equal buckets occurs, beside the order with the fewest repeats."""
    bucket_ids, epochs = order_columns(batches)
    here = np.bincount(statistics.find_runs(bucket_ids, epochs)[1])
    unavoidable = statistics.fewest_long_runs(bucket_ids, epochs)
    longest = max(len(here), len(unavoidable))
    return pl.DataFrame(
        {
            "run_length": np.arange(longest),
            "num_runs": np.pad(here, (0, longest - len(here))),
            "num_runs_unavoidable": np.pad(unavoidable, (0, longest - len(unavoidable))),
        }
    ).filter((pl.col("num_runs") > 0) | (pl.col("num_runs_unavoidable") > 0))


def transition_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """From each bucket to each bucket: count, share of what follows, and the share that a blind draw would give."""
    ids, counts = statistics.count_transitions(*order_columns(batches))
    totals = counts.sum(axis=1, keepdims=True)
    follow = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    number = len(ids)
    return pl.DataFrame(
        {
            "from_bucket": [label_of(int(one)) for one in np.repeat(ids, number)],
            "to_bucket": [label_of(int(one)) for one in np.tile(ids, number)],
            "count": counts.ravel(),
            "share": follow.ravel(),
            "share_of_batches": np.tile(counts.sum(axis=0) / max(counts.sum(), 1), number),
        }
    )


def lag_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """Correlation of the mean length of batches k places apart, beside what never repeating a bucket alone implies."""
    bucket_ids, epochs = order_columns(batches)
    mean_tokens = batches.get_column("mean_tokens").to_numpy()
    return pl.DataFrame(
        {
            "lag": np.arange(1, MAX_LAG + 1),
            "correlation": statistics.lag_correlations(mean_tokens, epochs, MAX_LAG),
            "correlation_of_the_rule_alone": statistics.rule_alone_correlations(
                mean_tokens, bucket_ids, epochs, MAX_LAG
            ),
        }
    ).drop_nans()


def tenth_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """Share of every bucket among the batches of each tenth of an epoch, all epochs together."""
    ids, shares = statistics.shares_by_tenth(*order_columns(batches))
    return pl.DataFrame(
        {
            "tenth": np.repeat(np.arange(1, TENTHS + 1), len(ids)),
            "bucket_id": np.tile(ids, TENTHS).astype(np.int32),
            "share_of_batches": shares.ravel(),
        }
    ).drop_nans()


def step_frame(batches: pl.DataFrame) -> pl.DataFrame:
    """One row a step: how many batches and buckets it mixes, its lengths and its padding."""
    entropy = statistics.entropy_by_step(
        batches.get_column("bucket_id").to_numpy(), batches.get_column("step").to_numpy()
    )
    return (
        batches.group_by("step", maintain_order=True)
        .agg(
            pl.col("epoch").first(),
            pl.len().cast(pl.Int64).alias("num_batches"),
            pl.col("bucket_id").n_unique().cast(pl.Int64).alias("num_buckets"),
            pl.col("batch_size").sum().alias("num_samples"),
            pl.col("num_tokens").sum(),
            pl.col("num_padded_tokens").sum(),
            pl.col("num_supervised_tokens").sum(),
            pl.col("num_anchors").sum(),
        )
        .with_columns(
            (pl.col("num_tokens") / pl.col("num_padded_tokens")).alias("padding_efficiency"),
            (pl.col("num_tokens") / pl.col("num_samples")).alias("mean_tokens"),
            pl.Series("entropy_bits", entropy),
        )
    )


def whole_entropy(batches: pl.DataFrame) -> float:
    """Entropy of the buckets of all batches: what a step would have if it were a perfect sample. Unit: bits."""
    shares = batches.get_column("bucket_id").value_counts().get_column("count").to_numpy() / len(batches)
    return float(-(shares * np.log2(shares)).sum())


def length_frame(num_tokens: NDArray[np.int64]) -> pl.DataFrame:
    """Samples and tokens by length, two classes per doubling."""
    classes = np.floor(2 * np.log2(np.maximum(num_tokens, 1))).astype(np.int64)
    frame = (
        pl.DataFrame({"class": classes, "num_tokens": num_tokens})
        .group_by("class")
        .agg(pl.len().cast(pl.Int64).alias("num_samples"), pl.col("num_tokens").sum())
    )
    full = (
        pl.DataFrame({"class": np.arange(classes.min(), classes.max() + 1)}) if len(classes) else frame.select("class")
    )
    return (
        full.join(frame, on="class", how="left")
        .sort("class")
        .with_columns(
            pl.col("num_samples", "num_tokens").fill_null(0),
            (2 ** (pl.col("class") / 2)).ceil().cast(pl.Int64).alias("from_tokens"),
        )
        .select(pl.col("from_tokens").cast(pl.String), "num_samples", "num_tokens")
    )


def thin(frame: pl.DataFrame, most: int = 600) -> tuple[pl.DataFrame, str]:
    """Average neighbouring rows until at most ``most`` are left.

    Args:
        frame: Numeric columns in order.
        most: Rows a chart can show.

    Returns:
        The frame and a remark for the reader, "" if nothing was averaged.
    """
    stretch = -(-len(frame) // most)
    if stretch <= 1:
        return frame, ""
    thinned = (
        frame.with_columns((pl.int_range(pl.len()) // stretch).alias("stretch"))
        .group_by("stretch", maintain_order=True)
        .agg(pl.all().mean())
        .drop("stretch")
    )
    return thinned, f" Each point is the mean of {stretch} neighbouring rows."
