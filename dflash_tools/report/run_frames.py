"""A run as frames: the log joined with the plan, curves, levels by bucket, time, resets and what surrounds them."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.report import causes, effects
from dflash_tools.report.columns import numbers, total_of
from dflash_tools.report.effects import Explained
from dflash_tools.report.run_log import RunLog


@dataclass(frozen=True, kw_only=True)
class RunFrames:
    """Frames over a run.

    Attributes:
        steps: One row a step: the log's fields, ``adjusted_loss`` (each bucket moved to the common level), ``residual``
            (loss above what its buckets were to be expected to have), ``seconds`` and marks of events.
        batches: One row a batch with ``adjusted_loss``, ``residual``, ``bucket_level`` and ``is_after_change``.
        levels: By bucket: loss, residual, grad norm.
        resets: One row a reset with what was near it.
        causes: What was near resets, beside how often it is near any step.
        around: The batches around each reset.
        timing: Seconds by kind of work.
        explained: Curve -> share of its variance, around its trend, that the buckets explain.
    """

    steps: pl.DataFrame
    batches: pl.DataFrame
    levels: pl.DataFrame
    resets: pl.DataFrame
    causes: pl.DataFrame
    around: pl.DataFrame
    timing: pl.DataFrame
    explained: dict[str, Explained]


def build_frames(log: RunLog) -> RunFrames:
    """Compute every frame.

    Args:
        log: At least one step.
    """
    batches = _mark_changes(effects.adjust_batches(log.batches))
    steps = _join_steps(log.steps, batches)
    found = effects.find_resets(steps.get_column("step").to_numpy(), numbers(steps, "residual"), numbers(steps, "loss"))
    resets = causes.describe_resets(found, steps, batches)
    return RunFrames(
        steps=steps,
        batches=batches,
        levels=_levels(steps, batches),
        resets=resets,
        causes=causes.cause_frame(resets, steps),
        around=causes.surroundings(resets, batches),
        timing=_timing(steps),
        explained=_explain(steps, batches),
    )


def name_samples(frames: RunFrames, plan: BatchPlan, sample_ids: pl.Series | None) -> RunFrames:
    """Add the ids of the samples of the batches around resets.

    Args:
        frames: Frames of a run with resets.
        plan: The plan that was trained.
        sample_ids: Name of every index row; None leaves the frames as they are.
    """
    if sample_ids is None:
        return frames
    batches = frames.around.get_column("batch")
    names = [", ".join(sample_ids.gather(plan.rows(batch)).to_list()) for batch in batches]
    return replace(frames, around=frames.around.with_columns(pl.Series("sample_ids", names, dtype=pl.String)))


def _mark_changes(batches: pl.DataFrame) -> pl.DataFrame:
    before = pl.col("bucket_id").shift(1)
    return batches.with_columns((before != pl.col("bucket_id")).fill_null(True).alias("is_after_change"))


def _join_steps(steps: pl.DataFrame, batches: pl.DataFrame) -> pl.DataFrame:
    joined = steps.join(effects.adjust_steps(batches), on="step", how="left", maintain_order="left")
    seconds = pl.sum_horizontal("data_wait_seconds", "compute_seconds", "checkpoint_seconds")
    return causes.mark_events(joined.with_columns(seconds.alias("seconds")), batches)


def _levels(steps: pl.DataFrame, batches: pl.DataFrame) -> pl.DataFrame:
    """Loss of every bucket, and the grad norm of steps by the bucket that most of their batches have."""
    main = batches.group_by("step").agg(pl.col("bucket_id").mode().min())
    norms = (
        steps.select("step", "grad_norm")
        .join(main, on="step")
        .group_by("bucket_id")
        .agg(
            pl.len().cast(pl.Int64).alias("num_steps"),
            pl.col("grad_norm").fill_nan(None).median().alias("median_grad_norm"),
        )
    )
    weight = pl.col("label_weight")
    return (
        batches.group_by("bucket_id")
        .agg(
            pl.len().cast(pl.Int64).alias("num_batches"),
            ((pl.col("loss") * weight).sum() / weight.sum()).alias("loss"),
            pl.col("loss").filter(weight > 0).tail(200).median().alias("recent_loss"),
            pl.col("acceptance_length").tail(200).mean().alias("recent_acceptance_length"),
            pl.col("residual").filter(pl.col("is_after_change")).median().alias("residual_after_change"),
            pl.col("residual").filter(~pl.col("is_after_change")).median().alias("residual_in_run"),
            (pl.col("num_truncated_blocks").sum() / pl.col("num_anchors").sum())
            .fill_nan(None)
            .alias("share_of_truncated_blocks"),
        )
        .join(norms, on="bucket_id", how="left")
        .sort("bucket_id")
    )


def _timing(steps: pl.DataFrame) -> pl.DataFrame:
    kinds = {"data wait": "data_wait_seconds", "compute": "compute_seconds", "checkpoint": "checkpoint_seconds"}
    total = float(np.nansum(numbers(steps, "seconds")))
    return pl.DataFrame(
        [
            {
                "work": kind,
                "total_seconds": float(steps.get_column(column).sum()),
                "share_of_time": float(steps.get_column(column).sum()) / total if total else float("nan"),
                "median_step_seconds": steps.get_column(column).median(),
                "p99_step_seconds": steps.get_column(column).quantile(0.99),
                "longest_step_seconds": steps.get_column(column).max(),
            }
            for kind, column in kinds.items()
        ]
    )


def _explain(steps: pl.DataFrame, batches: pl.DataFrame) -> dict[str, Explained]:
    window = effects.trend_window(len(steps))
    _, shares = effects.step_shares(batches)
    counted = batches.filter(pl.col("label_weight") > 0)
    loss = counted.get_column("loss").to_numpy()
    around = effects.around_trend(loss, effects.trend_window(len(loss)))
    return {
        "loss of batches": effects.explained_by_groups(around, counted.get_column("bucket_id").to_numpy()),
        **{
            f"{name.replace('_', ' ')} of steps": effects.explained_by_shares(
                effects.around_trend(steps.get_column(name).to_numpy(), window), shares
            )
            for name in ("loss", "grad_norm")
        },
    }


def planned_against_trained(plan: BatchPlan, log: RunLog) -> pl.DataFrame:
    """Planned and trained counts, and batches that differ."""
    trained = log.batches.get_column("batch").to_numpy()
    known = trained[(trained >= 0) & (trained < len(plan))]
    sizes = np.diff(plan.offsets)
    held = log.batches.filter(pl.col("batch").is_between(0, len(plan) - 1))
    differ = int(
        (
            (plan.bucket_ids[known] != held.get_column("bucket_id").to_numpy())
            | (sizes[known] != held.get_column("batch_size").to_numpy())
        ).sum()
    )
    steps = log.steps.get_column("step").to_numpy()
    missing = int(steps[-1] + 1 - len(steps)) if len(steps) else 0
    rows = [
        ("steps", plan.num_steps, len(steps)),
        ("batches", len(plan), len(trained)),
        ("samples visited", len(plan.sample_rows), total_of(log.batches, "batch_size")),
        ("epochs", len(np.unique(plan.epochs)), log.steps.get_column("epoch").n_unique()),
        ("batches of another bucket or size than planned", 0, differ + len(trained) - len(known)),
        ("steps missing in the log", 0, missing),
        ("updates skipped for non-finite gradients", 0, total_of(log.steps, "skipped")),
    ]
    return pl.DataFrame(rows, schema={"what": pl.String, "planned": pl.Int64, "trained": pl.Int64}, orient="row")
