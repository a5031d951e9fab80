"""How the batches of a plan follow each other, and the sentence about repeats that another order would not have."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan import statistics
from dflash_tools.report.causes import LONG_RUN
from dflash_tools.report.diagnosis import Finding

AVOIDABLE_REPEATS = 0.02  # of neighbouring pairs, above the minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFacts:
    """How the batches of a plan follow each other."""

    strategy: str
    num_batches: int
    largest_bucket: int
    largest_share: float  # of batches
    equal_neighbours: int
    equal_neighbours_minimum: int
    num_long_runs: int  # of three batches or more
    longest_run: int


def order_facts(plan: BatchPlan) -> OrderFacts:
    """Read the order of a plan that holds a batch."""
    ids, counts = np.unique(plan.bucket_ids, return_counts=True)
    _, runs = statistics.find_runs(plan.bucket_ids, plan.epochs)
    return OrderFacts(
        strategy=str(plan.settings.get("strategy", "")),
        num_batches=len(plan),
        largest_bucket=int(ids[np.argmax(counts)]),
        largest_share=float(counts.max() / len(plan)),
        equal_neighbours=statistics.count_equal_neighbours(plan.bucket_ids, plan.epochs),
        equal_neighbours_minimum=statistics.fewest_equal_neighbours(plan.bucket_ids, plan.epochs),
        num_long_runs=int((runs >= LONG_RUN).sum()),
        longest_run=int(runs.max()),
    )


def avoidable_repeats(order: OrderFacts, buckets: pl.DataFrame) -> Finding | None:
    """Neighbouring repeats of a bucket that another order would not have.

    Args:
        order: The order of a whole plan.
        buckets: ``bucket_id, min_tokens, max_tokens`` of the buckets met so far.
    """
    avoidable = order.equal_neighbours - order.equal_neighbours_minimum
    share = avoidable / max(order.num_batches - 1, 1)
    if order.strategy == "packed" or avoidable < 3 or share < AVOIDABLE_REPEATS:
        return None
    return Finding(
        rule="avoidable_repeats",
        weight=min(1.0, 0.5 + share),
        sentence=(
            f"{name_bucket(order.largest_bucket, buckets)} makes {order.largest_share:.0%} of batches; with "
            f"`{order.strategy}` there are {order.equal_neighbours:,} neighbouring repeats and {order.num_long_runs:,} "
            f'runs of three or more (longest {order.longest_run}); plan.strategy = "interleave" would leave '
            f"{order.equal_neighbours_minimum:,} repeats, the minimum."
        ),
    )


def name_bucket(bucket_id: int, buckets: pl.DataFrame) -> str:
    """A bucket with the lengths of its samples, to begin a sentence with."""
    rows = buckets.filter(pl.col("bucket_id") == bucket_id).to_dicts()
    if not rows:
        return f"Bucket {bucket_id}"
    return f"Bucket {bucket_id} ({rows[0]['min_tokens']:,} to {rows[0]['max_tokens']:,} tokens)"
