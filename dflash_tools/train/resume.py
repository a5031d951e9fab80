"""Going on from a checkpoint: the same run or none, with every differing field named."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.record import TrainState
from dflash_tools.contracts.run_folder import PLAN_FILE, RunCard, newest_checkpoint, read_card
from dflash_tools.errors import ResumeError
from dflash_tools.plan.table import load_plan

EXTENDABLE = frozenset({"num_epochs", "max_steps"})
"""Plan settings that may change on resume: the plan of an epoch does not depend on how many follow."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        checkpoint: The newest whole checkpoint.
        state: Its state.
        card: The run's identity card.
        plan: The plan that the checkpoint was trained on.
        problems: One sentence for each newer checkpoint that is not whole.
    """

    checkpoint: Path
    state: TrainState
    card: RunCard
    plan: BatchPlan
    problems: tuple[str, ...]


def find_resume_point(run_dir: Path) -> ResumePoint | None:
    """Find the newest whole checkpoint and what it belongs to; None if the run has no checkpoint yet.

    Raises:
        ResumeError: If there are checkpoints but none is whole, or their plan is gone.
    """
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return None
    checkpoint, state, problems = newest
    return ResumePoint(
        checkpoint=checkpoint,
        state=state,
        card=read_card(run_dir),
        plan=_load_plan_of(run_dir, state),
        problems=tuple(problems),
    )


def settings_of(config: TrainConfig, *, gamma: float, attention: str, device_type: str) -> dict[str, Any]:
    """Flat names and values of everything that changes the numbers of a run, besides plan, store and drafter.

    What is measured on the held-out samples belongs to it: losses on other ones cannot be compared to find the best.
    """
    values: dict[str, Any] = {f"loss.{name}": value for name, value in config.loss.model_dump().items()}
    values |= {f"optimizer.{name}": value for name, value in config.optimizer.model_dump().items()}
    return values | {
        "loss.loss_decay_gamma": gamma,
        "evaluation.num_anchors": config.evaluation.num_anchors,
        "evaluation.max_samples": config.evaluation.max_samples,
        "drafter.init_from": config.drafter.init_from,
        "hardware.autocast": config.hardware.autocast,
        "hardware.attention": attention,
        "hardware.device": device_type,
    }


def check_same_run(
    run_dir: Path,
    point: ResumePoint,
    *,
    store_fingerprints: tuple[str, ...],
    drafter: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: TrainConfig,
) -> None:
    """Refuse to go on as another run.

    Raises:
        ResumeError: Names every field that differs, with the value of the checkpoint and the one given now.
    """
    differing = []
    if point.state.store_fingerprints != store_fingerprints:
        differing.append(
            f"stores {_short(point.state.store_fingerprints)} (from "
            f"{', '.join(store.path for store in point.card.stores)}) there, {_short(store_fingerprints)} now"
        )
    differing += _differences("drafter.", point.card.drafter, drafter)
    differing += _differences("", point.card.settings, settings)
    plan_now = {k: v for k, v in config.plan.model_dump(mode="json").items() if k not in EXTENDABLE}
    plan_then = {k: v for k, v in point.plan.settings.items() if k not in EXTENDABLE}
    differing += _differences("plan.", plan_then, plan_now)
    threads = config.hardware.threads
    if threads != "auto" and threads != point.state.threads:
        differing.append(f"hardware.threads = {point.state.threads} there, {threads} now")
    if differing:
        raise ResumeError(
            f"{run_dir}: the checkpoint after step {point.state.step} belongs to another run: {'; '.join(differing)}. "
            "Going on would not be the run it was; give the original stores and settings, or a new run folder"
        )


def check_extension(run_dir: Path, old: BatchPlan, new: BatchPlan, step: int) -> None:
    """Check that a plan with other ``num_epochs`` or ``max_steps`` only adds or removes steps after ``step``.

    Raises:
        ResumeError: If steps that are done would have been others, or the new plan is shorter than what is done.
    """
    if new.num_steps < step:
        raise ResumeError(
            f"{run_dir}: {step} steps are done, but the plan now ends after {new.num_steps}; "
            "raise plan.num_epochs or plan.max_steps"
        )
    batches = int(np.searchsorted(old.steps, step))
    samples = int(old.offsets[batches])
    columns = ("epochs", "steps", "bucket_ids")
    same = all(np.array_equal(getattr(old, c)[:batches], getattr(new, c)[:batches]) for c in columns)
    same = same and np.array_equal(old.offsets[: batches + 1], new.offsets[: batches + 1])
    if not (same and np.array_equal(old.sample_rows[:samples], new.sample_rows[:samples])):
        raise ResumeError(
            f"{run_dir}: this installation plans the first {step} steps differently than {PLAN_FILE} has them, so the "
            "plan cannot be extended here; keep plan.num_epochs and plan.max_steps, or use the original NumPy version"
        )


def _load_plan_of(run_dir: Path, state: TrainState) -> BatchPlan:
    for path in [run_dir / PLAN_FILE, *sorted(run_dir.glob("plan-*.parquet"))]:
        if path.is_file():
            plan = load_plan(path)
            if plan.fingerprint() == state.plan_fingerprint:
                return plan
    raise ResumeError(
        f"{run_dir}: step {state.step} was trained on plan {state.plan_fingerprint[:12]}, which {PLAN_FILE} is not. "
        f"Going on would repeat or skip samples; restore the original {PLAN_FILE}, or start a new run folder"
    )


def _differences(prefix: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [*then, *(name for name in now if name not in then)]
    missing = "(not set)"
    pairs = [(name, _plain(then.get(name, missing)), _plain(now.get(name, missing))) for name in names]
    return [f"{prefix}{name} = {before} there, {after} now" for name, before, after in pairs if before != after]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(fingerprints: tuple[str, ...]) -> str:
    return ", ".join(fingerprint[:12] for fingerprint in fingerprints)
