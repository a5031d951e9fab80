"""What is unusual about a run: one function a rule, silent on a healthy run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_tools.config import TrainConfig
from dflash_tools.report.causes import LONG_RUN
from dflash_tools.report.columns import median_of, numbers, total_of
from dflash_tools.report.composition_sections import Composition
from dflash_tools.report.diagnosis import Finding
from dflash_tools.report.order import OrderFacts, avoidable_repeats
from dflash_tools.report.run_frames import RunFrames

# Each threshold: what a healthy run stays clear of.
WAITING = 0.15  # of the time
SAVING = 0.10  # of the time
NORM_EXPLAINED = 0.30  # share of grad-norm variance beyond chance
CHANGE_JUMP = 0.03  # residual after a change of bucket / loss
OVERFIT = 0.02  # held-out loss above its best
CLIPPED = 0.5  # of steps after the warm-up
SLOWER = 0.7  # tokens/s of the last tenth / of the first
NO_GAIN = 0.01  # acceptance length
MOST_RESETS = 0.5  # of resets are near their cause
CHANCE = 0.05  # of so many resets near an event that has nothing to do with them


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the rules look at.

    Attributes:
        frames: Frames over steps and batches.
        composition: Composition of the batches trained so far.
        order: How the batches of the whole plan follow each other.
        evaluations: One row an evaluation.
        against_plan: See ``run_frames.planned_against_trained``.
        config: The run's settings.
        num_planned_steps: Steps of the whole plan.
    """

    frames: RunFrames
    composition: Composition
    order: OrderFacts
    evaluations: pl.DataFrame
    against_plan: pl.DataFrame
    config: TrainConfig
    num_planned_steps: int

    @property
    def num_steps(self) -> int:
        """Steps trained so far."""
        return len(self.frames.steps)


def run_findings(facts: RunFacts) -> list[Finding]:
    """Apply every rule."""
    return [finding for rule in _RULES if (finding := rule(facts)) is not None]


def _skipped(facts: RunFacts) -> Finding | None:
    skipped = facts.frames.steps.filter(pl.col("skipped")).get_column("step")
    if skipped.is_empty():
        return None
    named = ", ".join(str(step) for step in skipped.head(5)) + (", ..." if len(skipped) > 5 else "")
    return Finding(
        rule="skipped",
        weight=min(1.0, 0.5 + len(skipped) / facts.num_steps),
        sentence=(
            f"{len(skipped):,} of {facts.num_steps:,} updates were skipped because their gradients were not finite "
            f"(steps {named}); "
            'lower optimizer.learning_rate or set hardware.autocast = "none".'
        ),
    )


def _resets(facts: RunFacts) -> Finding | None:
    resets = facts.frames.resets
    if resets.is_empty():
        return None
    number = len(resets)
    rise = median_of(resets, "rise")
    before = median_of(resets, "loss_before")
    return Finding(
        rule="resets",
        weight=min(1.0, 0.85 + number / 100),
        sentence=(
            f"{number} {'reset' if number == 1 else 'resets'}: the loss rose by {rise:.2f} above the level of its "
            f"buckets (from {before:.2f}), "
            f"first at step {resets.get_column('first_step')[0]:,}; {_likely_cause(facts)}."
        ),
    )


def _likely_cause(facts: RunFacts) -> str:
    """Name what is near most resets and would not be by chance."""
    likely = facts.frames.causes.filter((pl.col("share_of_resets") >= MOST_RESETS) & (pl.col("chance") < CHANCE))
    if likely.is_empty():
        return "nothing logged is near them more often than near any step; see the batches around each"
    cause = likely.row(0, named=True)
    what, advice = _CAUSES[cause["cause"]]
    where = what.format(bucket=_bucket_before(facts.frames.resets))
    return (
        f"{cause['num_resets_near']} of {len(facts.frames.resets)} come {where}, as do {cause['share_of_steps']:.1%} "
        "of all "
        f"steps: {advice}"
    )


def _bucket_before(resets: pl.DataFrame) -> str:
    """The bucket that most of the runs before resets have."""
    return str(resets.get_column("bucket_before").mode().sort().to_list()[0])


_CAUSES = {
    "checkpoint": ("right after a checkpoint", "saving disturbs training, not the order of batches"),
    "data stall": ("right after a stall of the data feed", "look at what was read then"),
    "resume": ("right after a resume", "the restored state is not the saved one"),
    "skipped update": ("with skipped updates", "lower optimizer.learning_rate"),
    "epoch start": ("at the start of an epoch", "see what the order of epochs changes"),
    "long run of a bucket": (
        "right after three or more batches in a row of one bucket (mostly {bucket})",
        'the order of batches, not checkpoints or data; plan.strategy = "interleave" breaks such runs',
    ),
}


def _waiting(facts: RunFacts) -> Finding | None:
    share = _share_of_time(facts, "data wait")
    if share < WAITING:
        return None
    return Finding(
        rule="waiting",
        weight=share,
        sentence=(
            f"Training waited for data {share:.0%} of the time; the disk reads slower than the drafter trains: put "
            "the store on a faster disk, "
            "raise hardware.prefetch_bytes, or store with less bytes (store.codec, store.hidden_states_dtype)."
        ),
    )


def _saving(facts: RunFacts) -> Finding | None:
    share = _share_of_time(facts, "checkpoint")
    if share < SAVING or facts.num_steps < 20:
        return None
    return Finding(
        rule="saving",
        weight=share,
        sentence=(
            f"Checkpoints take {share:.0%} of the time at one every {facts.config.checkpoint.save_steps:,} updates; "
            "raise checkpoint.save_steps."
        ),
    )


def _norm_explained(facts: RunFacts) -> Finding | None:
    explained = facts.frames.explained["grad norm of steps"]
    if not explained.excess > NORM_EXPLAINED or facts.num_steps < 50:
        return None
    levels = facts.frames.levels.drop_nulls("median_grad_norm").sort("median_grad_norm")
    if len(levels) < 2:
        return None
    low, high = levels.row(0, named=True), levels.row(-1, named=True)
    return Finding(
        rule="norm_explained",
        weight=0.5 * explained.eta_squared,
        sentence=(
            f"The mix of buckets explains {explained.eta_squared:.0%} of the variance of the grad norm (chance: "
            f"{explained.eta_squared_by_chance:.0%}): "
            f"{high['median_grad_norm']:.3g} where bucket {high['bucket_id']} prevails, "
            f"{low['median_grad_norm']:.3g} where bucket {low['bucket_id']} does; "
            "more plan.batches_per_step makes updates more alike."
        ),
    )


def _change_jump(facts: RunFacts) -> Finding | None:
    """After a run of one bucket the others should not have become worse."""
    batches = facts.frames.batches.drop_nulls("residual")
    runs = total_of(facts.composition.runs.filter(pl.col("run_length") >= LONG_RUN), "num_runs")
    after, inside = batches.filter("is_after_change"), batches.filter(~pl.col("is_after_change"))
    if len(after) < 50 or len(inside) < 50 or runs < 10:
        return None
    jump = median_of(after, "residual") - median_of(inside, "residual")
    level = median_of(batches, "bucket_level")
    if jump < CHANGE_JUMP * level:
        return None
    return Finding(
        rule="change_jump",
        weight=0.5,
        sentence=(
            f"Right after a change of bucket the loss lies {jump:.3f} above the level of its bucket, inside runs it "
            "does not: runs of one bucket "
            'undo what the others taught; plan.strategy = "interleave" shortens them.'
        ),
    )


def _overfit(facts: RunFacts) -> Finding | None:
    held_out = facts.evaluations.filter(pl.col("loss").is_finite())
    if len(held_out) < 3:
        return None
    best = held_out.sort("loss").row(0, named=True)
    last = held_out.row(-1, named=True)
    if last["loss"] < (1 + OVERFIT) * best["loss"]:
        return None
    return Finding(
        rule="overfit",
        weight=0.6,
        sentence=(
            f"The held-out loss was best at step {best['step']:,} ({best['loss']:.3f}) and is {last['loss']:.3f} at "
            f"step {last['step']:,}: "
            "later updates did harm; use checkpoint `best`, or fewer plan.num_epochs."
        ),
    )


def _no_gain(facts: RunFacts) -> Finding | None:
    held_out = facts.evaluations.filter(pl.col("acceptance_length").is_finite())
    if len(held_out) < 2 or facts.num_steps < 0.5 * facts.num_planned_steps:
        return None
    first, last = held_out.get_column("acceptance_length")[0], held_out.get_column("acceptance_length")[-1]
    if last - first > NO_GAIN:
        return None
    return Finding(
        rule="no_gain",
        weight=0.9,
        sentence=(
            f"The held-out acceptance length is {last:.3f} after {facts.num_steps:,} updates and was {first:.3f} "
            "before: the drafter does not "
            "learn to draft; train longer (plan.num_epochs) or raise optimizer.learning_rate."
        ),
    )


def _clipped(facts: RunFacts) -> Finding | None:
    settings = facts.config.optimizer
    steps = facts.frames.steps.filter(pl.col("step") >= settings.warmup_ratio * facts.num_planned_steps)
    share = float(np.mean(numbers(steps, "grad_norm") > settings.max_grad_norm)) if len(steps) else 0.0
    if len(steps) < 50 or share < CLIPPED:
        return None
    median = median_of(steps, "grad_norm")
    return Finding(
        rule="clipped",
        weight=0.3 * share,
        sentence=(
            f"{share:.0%} of updates after the warm-up were clipped (median grad norm {median:.3g}, "
            "optimizer.max_grad_norm = "
            f"{settings.max_grad_norm:g}), so the clip, not the learning rate, sets the pace; raise it or lower "
            "optimizer.learning_rate."
        ),
    )


def _slower(facts: RunFacts) -> Finding | None:
    speed = numbers(facts.frames.steps, "tokens_per_second")
    tenth = len(speed) // 10
    if tenth < 20:
        return None
    first, last = (float(np.median(part)) for part in (speed[:tenth], speed[-tenth:]))
    if not last < SLOWER * first:
        return None
    return Finding(
        rule="slower",
        weight=1 - last / first,
        sentence=(
            f"The last tenth of the steps trained {last:,.0f} real tokens/s, the first tenth {first:,.0f}: something "
            "else uses the machine, "
            "or the page cache no longer holds the store."
        ),
    )


def _off_plan(facts: RunFacts) -> Finding | None:
    rows = {row["what"]: row for row in facts.against_plan.iter_rows(named=True)}
    differ = rows["batches of another bucket or size than planned"]["trained"]
    missing = rows["steps missing in the log"]["trained"]
    if not differ and not missing:
        return None
    return Finding(
        rule="off_plan",
        weight=0.8,
        sentence=(
            f"The log is not what was planned: {missing:,} steps are missing, {differ:,} batches have another bucket "
            "or size than in plan.parquet."
        ),
    )


def _order(facts: RunFacts) -> Finding | None:
    # The order was fixed before step 0, so the whole plan speaks, however much of it is trained.
    return avoidable_repeats(facts.order, facts.composition.buckets)


def _share_of_time(facts: RunFacts, work: str) -> float:
    value = facts.frames.timing.filter(pl.col("work") == work).get_column("share_of_time")[0]
    return float(value) if np.isfinite(value) else 0.0


_RULES: tuple[Callable[[RunFacts], Finding | None], ...] = (
    _skipped,
    _resets,
    _order,
    _waiting,
    _saving,
    _norm_explained,
    _change_jump,
    _overfit,
    _no_gain,
    _clipped,
    _slower,
    _off_plan,
)
