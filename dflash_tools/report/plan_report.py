"""``report plan``: what a run would do, from the index alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.config import PlanSettings, TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan import build_plan
from dflash_tools.plan.composition import binding_limits
from dflash_tools.plan.statistics import batch_lengths
from dflash_tools.plan.stores import plan_stores
from dflash_tools.report import composition
from dflash_tools.report.composition import SampleColumns
from dflash_tools.report.composition_sections import bucket_section, compose, mixing_section, order_section
from dflash_tools.report.diagnosis import choose_sentences
from dflash_tools.report.document import Chart, Report, Section, Table, share_of
from dflash_tools.report.plan_rules import PlanFacts, plan_findings
from dflash_tools.report.sources import read_pool

_LIMITS = ("by_tokens", "by_anchors", "by_batch_size", "by_window")


def report_plan(config: TrainConfig, stores: Sequence[Path]) -> Report:
    """Make the plan of a run and report on it; reads index and manifest, no array.

    Raises:
        ConfigError: If the plan cannot be made with these settings.
        StoreError: If a store is missing, unfinished or damaged.
    """
    pool = read_pool(stores)
    plan = plan_stores(pool.columns, config.plan, config.loss)
    return report_of_plan(
        plan, pool.samples(config.loss), config.plan, subject=", ".join(str(store) for store in stores)
    )


def report_of_plan(plan: BatchPlan, samples: SampleColumns, settings: PlanSettings, *, subject: str) -> Report:
    """Report on a plan that is already made."""
    whole = compose(composition.frame_of_plan(plan, samples))
    weights = weight_frame(plan, samples)
    limits = limit_frame(plan, samples, whole.batches)
    facts = PlanFacts(
        composition=whole,
        settings=settings,
        weights=weights,
        limits=limits,
        left_out=plan.left_out,
        num_without_anchor=_without_anchor(plan, samples),
        sorted_efficiency=_sorted_efficiency(plan, samples, settings),
    )
    figures = {
        "strategy": settings.strategy,
        "num_samples": len(np.unique(plan.sample_rows)),
        **whole.figures(),
        "left_out": dict(plan.left_out),
        "plan_fingerprint": plan.fingerprint(),
    }
    return Report(
        kind="plan",
        title="Plan of a run",
        subject=subject,
        figures=figures,
        diagnosis=choose_sentences(plan_findings(facts)),
        sections=(
            bucket_section(whole, (limit_table(limits), length_chart(samples.num_tokens[np.unique(plan.sample_rows)]))),
            weight_section(weights),
            order_section(whole),
            mixing_section(whole),
        ),
    )


def weight_frame(plan: BatchPlan, samples: SampleColumns) -> pl.DataFrame:
    """How much a supervised token counts by the sample's bucket: blocks per possible anchor, 1 = the average.

    Under ``packed`` the buckets are those of the samples.
    """
    rows = plan.sample_rows
    frame = (
        pl.DataFrame(
            {
                "bucket_id": samples.bucket_ids[rows],
                "num_valid_anchors": samples.num_valid_anchors[rows],
                "num_anchors": samples.num_anchors[rows],
                "is_capped": samples.num_anchors[rows] < samples.num_valid_anchors[rows],
            }
        )
        .group_by("bucket_id")
        .agg(
            pl.col("num_valid_anchors", "num_anchors").sum(),
            pl.col("is_capped").mean().alias("share_of_capped_samples"),
        )
        .sort("bucket_id")
        .with_columns(
            (pl.col("num_anchors") / pl.col("num_valid_anchors")).fill_nan(None).alias("share_of_anchors_used")
        )
    )
    average = pl.col("num_anchors").sum() / pl.col("num_valid_anchors").sum()
    return frame.with_columns((pl.col("share_of_anchors_used") / average).alias("token_weight"))


def weight_section(weights: pl.DataFrame) -> Section:
    """What a supervised token of each bucket counts."""
    return Section(
        title="Anchors",
        text=(
            "Anchors are capped per sample, so a supervised token of a long sample counts less than one of a short "
            "sample."
        ),
        parts=(
            Table(
                name="anchor_weights",
                title="Weight of a supervised token",
                frame=weights,
                note='Token weight 1 = average; loss.anchor_rule = "proportional" makes it 1 everywhere.',
            ),
        ),
    )


def limit_frame(plan: BatchPlan, samples: SampleColumns, batches: pl.DataFrame) -> pl.DataFrame:
    """Which limit ends a batch, by bucket: padded tokens, anchors, rows, or the end of the window."""
    padded = batches.group_by("bucket_id").agg(
        pl.col("num_padded_tokens").mean().round(0).cast(pl.Int64).alias("mean_padded_tokens")
    )
    limits = [
        {
            "bucket_id": limit.bucket_id,
            "mean_batch_size": limit.mean_batch_size,
            **{
                f"share_ended_by_{name.removeprefix('by_')}": getattr(limit, name) / limit.num_batches
                for name in _LIMITS
            },
        }
        for limit in binding_limits(plan, samples.num_tokens, samples.num_anchors)
    ]
    return (
        pl.DataFrame(limits)
        .join(padded.with_columns(pl.col("bucket_id").cast(pl.Int64)), on="bucket_id", how="left")
        .sort("bucket_id")
    )


def limit_table(limits: pl.DataFrame) -> Table:
    """The table of limits."""
    return Table(
        name="limits",
        title="What ends a batch",
        frame=limits,
        note=(
            "tokens: plan.token_budget; anchors: plan.anchor_budget; batch size: plan.max_batch_size; window: none "
            "of these, its samples are used up."
        ),
    )


def length_chart(num_tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Chart:
    """Histogram of sample lengths."""
    median = int(np.median(num_tokens)) if len(num_tokens) else 0
    return Chart(
        name="lengths",
        title="Samples by length",
        description=f"Two classes per doubling; median {median:,} tokens.",
        kind="bars",
        frame=composition.length_frame(num_tokens),
        x="from_tokens",
        y="num_samples",
        titles={"from_tokens": "from this many tokens", "num_samples": "samples"},
    )


def _without_anchor(plan: BatchPlan, samples: SampleColumns) -> int:
    return int((samples.num_anchors[np.unique(plan.sample_rows)] == 0).sum())


def _sorted_efficiency(plan: BatchPlan, samples: SampleColumns, settings: PlanSettings) -> float:
    """Padding efficiency of an epoch whose buckets are sorted whole: the best that plan.sort_window can give."""
    rows = np.unique(plan.sample_rows)
    whole_buckets = settings.model_copy(
        update={"sort_window": len(rows), "num_epochs": 1, "max_steps": None, "store_weights": None}
    )
    best = build_plan(samples.num_tokens[rows], samples.bucket_ids[rows], whole_buckets, samples.num_anchors[rows])
    lengths = batch_lengths(best, samples.num_tokens[rows])
    return share_of(int(lengths.num_tokens.sum()), int(lengths.num_padded_tokens.sum()))
