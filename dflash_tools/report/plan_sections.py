"""What only a plan can say: limits, anchors and their weights, lengths, ranks, and batch mates of the next epoch."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan.composition import binding_limits, repeated_pairs, slot_efficiency
from dflash_tools.plan.dealing import deal_to_ranks
from dflash_tools.plan.statistics import depletion
from dflash_tools.report import composition
from dflash_tools.report.composition import SampleColumns
from dflash_tools.report.document import Chart, Section, Table

_LIMITS = ("by_tokens", "by_anchors", "by_batch_size", "by_window")
WORLD_SIZES = (2, 4, 8)
MOST_STEPS = 2000  # dealt to ranks, evenly spread over the run


def weight_frame(plan: BatchPlan, samples: SampleColumns, block_size: int) -> pl.DataFrame:
    """How much a supervised token counts by the sample's bucket: blocks per possible anchor, 1 = the average.

    Under ``packed`` the buckets are those of the samples. Beside it: the share of drafted slots that carry a label,
    estimated from the index (blocks at the end of a turn run past it).
    """
    rows = plan.sample_rows
    filled = slot_efficiency(samples.num_anchors, samples.num_valid_anchors, samples.num_supervised_tokens, block_size)[
        rows
    ]
    filled_slots = np.nan_to_num(filled) * samples.num_anchors[rows]
    frame = (
        pl.DataFrame(
            {
                "bucket_id": samples.bucket_ids[rows],
                "num_valid_anchors": samples.num_valid_anchors[rows],
                "num_anchors": samples.num_anchors[rows],
                "num_filled_blocks": filled_slots,
                "is_capped": samples.num_anchors[rows] < samples.num_valid_anchors[rows],
            }
        )
        .group_by("bucket_id")
        .agg(
            pl.col("num_valid_anchors", "num_anchors", "num_filled_blocks").sum(),
            pl.col("is_capped").mean().alias("share_of_capped_samples"),
        )
        .sort("bucket_id")
        .with_columns(
            (pl.col("num_anchors") / pl.col("num_valid_anchors")).fill_nan(None).alias("share_of_anchors_used"),
            (pl.col("num_filled_blocks") / pl.col("num_anchors")).fill_nan(None).alias("slot_efficiency"),
        )
        .drop("num_filled_blocks")
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
                note=(
                    'Token weight 1 = average; loss.anchor_rule = "proportional" makes it 1 everywhere. Slot '
                    "efficiency: drafted slots that carry a label, estimated."
                ),
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


def length_chart(num_tokens: NDArray[np.int64]) -> Chart:
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


def rank_table(batches: pl.DataFrame, batches_per_step: int) -> Table:
    """How evenly the blocks of a step spread over ranks."""
    return Table(
        name="ranks",
        title="Blocks of the busiest rank / mean of the ranks",
        frame=rank_frame(batches, batches_per_step),
        note=(
            "A step takes as long as its busiest rank; 1 = perfectly even. Batches are dealt by cost; dealing by "
            f"position stands beside it. Over at most {MOST_STEPS:,} whole steps, evenly spread over the run."
        ),
    )


def rank_frame(batches: pl.DataFrame, batches_per_step: int) -> pl.DataFrame:
    """Largest / mean blocks of a rank, for the world sizes that divide a step, dealt by cost and by position."""
    sizes = batches.group_by("step", maintain_order=True).agg(pl.col("num_anchors"))
    whole = sizes.filter(pl.col("num_anchors").list.len() == batches_per_step).gather_every(
        max(1, len(sizes) // MOST_STEPS)
    )
    costs = np.array(whole.get_column("num_anchors").to_list(), dtype=np.float64).reshape(len(whole), batches_per_step)
    costs = costs[costs.sum(axis=1) > 0]
    rows = []
    for world_size in (size for size in WORLD_SIZES if batches_per_step % size == 0 and len(costs)):
        by_position = costs.reshape(len(costs), world_size, -1).sum(axis=2)
        by_cost = np.array([[step[place].sum() for place in deal_to_ranks(step, world_size)] for step in costs])
        rows.append(
            {
                "num_ranks": world_size,
                **{
                    f"{name}_{how}": float(figure(loads.max(axis=1) / loads.mean(axis=1)))
                    for how, loads in (("by_cost", by_cost), ("by_position", by_position))
                    for name, figure in (("mean", np.mean), ("worst", np.max))
                },
            }
        )
    return pl.DataFrame(rows)


def mate_figures(plan: BatchPlan) -> dict[str, float]:
    """Share of the pairs of batch mates that share a batch again in the next epoch; nothing for a single epoch."""
    shares = repeated_pairs(plan)
    known = shares[np.isfinite(shares)]
    return {"share_of_repeated_pairs": float(known.mean())} if len(known) else {}


def depletion_table(batches: pl.DataFrame) -> Table:
    """How long each bucket lasts in an epoch."""
    ids, shares = depletion(*composition.order_columns(batches))
    return Table(
        name="depletion",
        title="How far into an epoch a bucket lasts",
        frame=pl.DataFrame({"bucket_id": ids, "share_of_epoch": shares}),
        note="Up to its last batch, in the epoch where that comes earliest.",
    )
