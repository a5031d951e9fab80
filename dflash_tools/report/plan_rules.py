"""What is unusual about a plan: one function a rule, silent on a healthy plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_tools.config import PlanSettings
from dflash_tools.report.columns import numbers, total_of
from dflash_tools.report.composition_sections import Composition
from dflash_tools.report.diagnosis import Finding
from dflash_tools.report.order import AVOIDABLE_REPEATS, OrderFacts, avoidable_repeats, name_bucket

# Each threshold: what a healthy plan stays clear of.
UNAVOIDABLE_REPEATS = 0.10  # of neighbouring pairs
LOW_EFFICIENCY = 0.92
WORTH_SORTING = 0.01  # of padded tokens, saved by a full sort
UNUSED_BUDGET = 0.5  # padded tokens of a batch / token budget
SKEWED_WEIGHTS = 10.0  # heaviest / lightest supervised token
POSITIVE_CORRELATION = 0.1
DRIFT = 0.08  # of a bucket's share between tenths, beyond chance
UNMIXED_STEPS = 0.5  # entropy of a step / the most its batches could have
HEAVY_BATCH = 4.0  # largest / mean blocks of a batch
WITHOUT_ANCHOR = 0.01  # of samples


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What the rules look at.

    Attributes:
        composition: Frames over the batches.
        order: How they follow each other.
        settings: The settings that made the plan.
        weights: Weight of a supervised token by bucket; see ``plan_sections.weight_frame``.
        limits: What ends a batch; see ``plan_sections.limit_frame``.
        left_out: Samples in no batch, by reason.
        num_without_anchor: Samples in the plan without a single block.
        sorted_efficiency: Padding efficiency if every bucket were sorted by length before cutting.
    """

    composition: Composition
    order: OrderFacts
    settings: PlanSettings
    weights: pl.DataFrame
    limits: pl.DataFrame
    left_out: Mapping[str, int]
    num_without_anchor: int
    sorted_efficiency: float


def plan_findings(facts: PlanFacts) -> list[Finding]:
    """Apply every rule."""
    return [finding for rule in _RULES if (finding := rule(facts)) is not None]


def _order(facts: PlanFacts) -> Finding | None:
    return avoidable_repeats(facts.order, facts.composition.buckets)


def _unavoidable_repeats(facts: PlanFacts) -> Finding | None:
    order = facts.order
    share = order.equal_neighbours_minimum / max(order.num_batches - 1, 1)
    if len(facts.composition.buckets) < 2 or share < UNAVOIDABLE_REPEATS:
        return None
    return Finding(
        rule="unavoidable_repeats",
        weight=share,
        sentence=(
            f"{name_bucket(order.largest_bucket, facts.composition.buckets)} makes {order.largest_share:.0%} of "
            f"batches, so even the best order repeats it {order.equal_neighbours_minimum:,} times in "
            f"{order.num_batches - 1:,} pairs; split it (buckets.edges when extracting) or use "
            'plan.strategy = "packed".'
        ),
    )


def _low_efficiency(facts: PlanFacts) -> Finding | None:
    whole = facts.composition
    if whole.padding_efficiency >= LOW_EFFICIENCY:
        return None
    wasted = whole.batches.group_by("bucket_id").agg(
        (pl.col("num_padded_tokens") - pl.col("num_tokens")).sum().alias("wasted")
    )
    worst = whole.buckets.join(wasted, on="bucket_id").sort("wasted").row(-1, named=True)
    return Finding(
        rule="low_efficiency",
        weight=1.0 - whole.padding_efficiency,
        sentence=(
            f"{1 - whole.padding_efficiency:.1%} of padded tokens are padding, most of it in "
            f"{_inside(worst)}, efficiency {worst['padding_efficiency']:.1%}; "
            f"{_padding_advice(facts)}."
        ),
    )


def _padding_advice(facts: PlanFacts) -> str:
    settings, floor = facts.settings, 1 - facts.sorted_efficiency
    if settings.strategy == "packed":
        return "the last rows of an epoch are not full: few samples fill a row of plan.token_budget"
    if facts.sorted_efficiency - facts.composition.padding_efficiency > WORTH_SORTING:
        return f"a full sort would leave {floor:.1%}, so raise plan.sort_window (now {settings.sort_window})"
    return (
        f"a full sort would still leave {floor:.1%}, so cut more buckets (buckets.count) or use "
        'plan.strategy = "packed"'
    )


def _unused_budget(facts: PlanFacts) -> Finding | None:
    budget = facts.settings.token_budget
    shares = facts.composition.buckets.select("bucket_id", "min_tokens", "max_tokens", "share_of_batches")
    capped = (
        facts.limits.join(shares, on="bucket_id")
        .filter(
            (pl.col("share_ended_by_batch_size") > 0.5)
            & (pl.col("mean_padded_tokens") < UNUSED_BUDGET * budget)
            & (pl.col("share_of_batches") > 0.1)
        )
        .sort("share_of_batches")
    )
    if capped.is_empty():
        return None
    worst = capped.row(-1, named=True)
    rows = int(budget * worst["mean_batch_size"] / worst["mean_padded_tokens"])
    return Finding(
        rule="unused_budget",
        weight=0.5 * worst["share_of_batches"],
        sentence=(
            f"Batches of {_inside(worst)} stop at plan.max_batch_size = {facts.settings.max_batch_size} "
            "rows and use "
            f"{worst['mean_padded_tokens']:,} of the {budget:,} tokens of plan.token_budget; plan.max_batch_size = "
            f"{rows} would use them all."
        ),
    )


def _skewed_weights(facts: PlanFacts) -> Finding | None:
    total = total_of(facts.weights, "num_valid_anchors")
    common = facts.weights.filter((pl.col("num_valid_anchors") > 0.02 * total) & (pl.col("token_weight") > 0)).sort(
        "token_weight"
    )
    if len(common) < 2:
        return None
    light, heavy = common.row(0, named=True), common.row(-1, named=True)
    ratio = heavy["token_weight"] / light["token_weight"]
    if ratio < SKEWED_WEIGHTS:
        return None
    return Finding(
        rule="skewed_weights",
        weight=0.25,
        sentence=(
            f"A supervised token of bucket {heavy['bucket_id']} counts {ratio:.1f} times as much as one of bucket "
            f"{light['bucket_id']}, because "
            f"loss.num_anchors caps {light['share_of_capped_samples']:.0%} of its samples; "
            'loss.anchor_rule = "proportional" evens it.'
        ),
    )


def _positive_correlation(facts: PlanFacts) -> Finding | None:
    value = facts.composition.lag_1_correlation
    repeats = facts.composition.equal_neighbours - facts.composition.equal_neighbours_minimum
    # Repeats of a bucket already explain it; they have a rule of their own.
    if (
        not value > POSITIVE_CORRELATION
        or repeats > AVOIDABLE_REPEATS * len(facts.composition.batches)
        or len(facts.composition.batches) < 200
    ):
        return None
    return Finding(
        rule="positive_correlation",
        weight=0.5 * value,
        sentence=(
            f"The mean length of neighbouring batches correlates by {value:+.2f}, where mixing gives 0 or less: "
            "lengths drift; "
            'plan.strategy = "interleave" with more plan.batches_per_step evens them.'
        ),
    )


def _drift(facts: PlanFacts) -> Finding | None:
    whole = facts.composition
    if facts.settings.strategy == "sequential" or len(whole.batches) < 100:
        return None
    epoch_batches = len(whole.batches) / whole.batches.get_column("epoch").n_unique()
    spans = (
        whole.tenths.group_by("bucket_id")
        .agg(
            pl.col("share_of_batches").sort_by("tenth").first().alias("first"),
            pl.col("share_of_batches").sort_by("tenth").last().alias("last"),
        )
        .with_columns((pl.col("last") - pl.col("first")).alias("change"))
        .sort(pl.col("change").abs())
    )
    worst = spans.row(-1, named=True)
    # A tenth drawn blindly strays by about one standard deviation of a proportion; three of a difference are no chance.
    mean = (worst["first"] + worst["last"]) / 2
    chance = 3 * float(np.sqrt(2 * mean * (1 - mean) / max(len(whole.batches) / 10, epoch_batches / 10)))
    if abs(worst["change"]) < max(DRIFT, chance):
        return None
    return Finding(
        rule="drift",
        weight=abs(worst["change"]),
        sentence=(
            f"Bucket {worst['bucket_id']} makes {worst['first']:.0%} of the first tenth of an epoch and "
            f"{worst['last']:.0%} of the last; "
            'plan.strategy = "interleave" keeps every bucket\'s share level.'
        ),
    )


def _unmixed_steps(facts: PlanFacts) -> Finding | None:
    whole, settings = facts.composition, facts.settings
    possible = min(whole.entropy_bits, float(np.log2(settings.batches_per_step)))
    if settings.strategy == "packed" or settings.batches_per_step < 2 or possible < 0.5 or len(whole.steps) < 4:
        return None
    if whole.mean_step_entropy_bits >= UNMIXED_STEPS * possible:
        return None
    single = float(np.mean(numbers(whole.steps, "num_buckets") == 1))
    return Finding(
        rule="unmixed_steps",
        weight=0.6 * (1 - whole.mean_step_entropy_bits / possible),
        sentence=(
            f"{single:.0%} of steps hold a single bucket, though {settings.batches_per_step} batches make a step: "
            "updates swing from length to length; "
            'plan.strategy = "interleave" mixes buckets inside every step.'
        ),
    )


def _heavy_batch(facts: PlanFacts) -> Finding | None:
    anchors = facts.composition.batches.get_column("num_anchors").to_numpy()
    ratio = float(anchors.max() / max(anchors.mean(), 1))
    if facts.settings.anchor_budget is not None or ratio < HEAVY_BATCH:
        return None
    return Finding(
        rule="heavy_batch",
        weight=0.2,
        sentence=(
            f"The largest batch has {int(anchors.max()):,} blocks, {ratio:.1f} times the mean, and blocks are the "
            "cost of a step; "
            f"plan.anchor_budget = {int(2 * anchors.mean())} bounds them."
        ),
    )


def _left_out(facts: PlanFacts) -> Finding | None:
    total = sum(facts.left_out.values())
    if not total:
        return None
    reasons = ", ".join(f"{reason}: {number:,}" for reason, number in facts.left_out.items())
    held = total_of(facts.composition.buckets, "samples_per_epoch")
    return Finding(
        rule="left_out",
        weight=total / (total + held),
        sentence=f"{total:,} training samples are in no batch ({reasons}).",
    )


def _without_anchor(facts: PlanFacts) -> Finding | None:
    held = max(total_of(facts.composition.buckets, "samples_per_epoch"), 1)
    share = facts.num_without_anchor / held
    if share < WITHOUT_ANCHOR:
        return None
    return Finding(
        rule="without_anchor",
        weight=share,
        sentence=(
            f"{facts.num_without_anchor:,} samples ({share:.1%}) have no two supervised tokens in a row, so they "
            "cost tokens and teach "
            "nothing; check data.loss_on and the chat template."
        ),
    )


def _inside(row: Mapping[str, int]) -> str:
    return f"bucket {row['bucket_id']} ({row['min_tokens']:,} to {row['max_tokens']:,} tokens)"


_RULES: tuple[Callable[[PlanFacts], Finding | None], ...] = (
    _order,
    _unavoidable_repeats,
    _low_efficiency,
    _unused_budget,
    _skewed_weights,
    _positive_correlation,
    _drift,
    _unmixed_steps,
    _heavy_batch,
    _left_out,
    _without_anchor,
)
