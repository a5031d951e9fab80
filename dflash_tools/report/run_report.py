"""``report run``: what a run did, the plan joined with the log."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflash_tools.config import TrainConfig, load_config
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.run_folder import CONFIG_FILE, PLAN_FILE, RunCard, read_card
from dflash_tools.errors import StoreError
from dflash_tools.plan.table import load_plan
from dflash_tools.report.columns import mean_of, median_of, numbers, total_of
from dflash_tools.report.composition_sections import bucket_section, compose, mixing_section, order_section
from dflash_tools.report.decoding import decoding_section, read_results
from dflash_tools.report.diagnosis import choose_sentences
from dflash_tools.report.document import Report, Section, share_of
from dflash_tools.report.order import order_facts
from dflash_tools.report.run_frames import RunFrames, build_frames, name_samples, planned_against_trained
from dflash_tools.report.run_log import RunLog, read_run_log
from dflash_tools.report.run_rules import RunFacts, run_findings
from dflash_tools.report.run_sections import (
    curve_section,
    effect_section,
    held_out_section,
    reset_section,
    time_section,
)
from dflash_tools.report.sources import read_pool


def report_run(run: Path) -> Report:
    """Report on a run, also while it trains; nothing is written to it or locked.

    Raises:
        ResumeError: If the folder is no run, or its plan is damaged.
    """
    card = read_card(run)
    plan = load_plan(run / PLAN_FILE)
    config = load_config(run / CONFIG_FILE, TrainConfig)
    log = read_run_log(run)
    if log.steps.is_empty():
        return Report(
            kind="run",
            title="Run",
            subject=str(run),
            figures={"num_steps": 0, "num_planned_steps": plan.num_steps, **_identity(card, plan)},
            notes=(*log.notes, "no step has been logged yet"),
        )
    frames = build_frames(log)
    results, result_notes = read_results(run)
    notes = (*log.notes, *result_notes)
    if len(frames.resets):
        sample_ids, more_notes = _sample_ids(card, plan)
        frames, notes = name_samples(frames, plan, sample_ids), (*notes, *more_notes)
    return _report(run, card, plan, config, log, frames, decoding_section(results), notes)


def _report(
    run: Path,
    card: RunCard,
    plan: BatchPlan,
    config: TrainConfig,
    log: RunLog,
    frames: RunFrames,
    decoding: Section,
    notes: tuple[str, ...],
) -> Report:
    whole = compose(frames.batches)
    against_plan = planned_against_trained(plan, log)
    facts = RunFacts(
        frames=frames,
        composition=whole,
        order=order_facts(plan),
        evaluations=log.evaluations,
        against_plan=against_plan,
        config=config,
        num_planned_steps=plan.num_steps,
    )
    return Report(
        kind="run",
        title="Run",
        subject=str(run),
        figures={
            "num_planned_steps": plan.num_steps,
            **whole.figures(),
            **_training_figures(frames, log),
            **_identity(card, plan),
        },
        diagnosis=choose_sentences(run_findings(facts)),
        notes=notes,
        sections=(
            curve_section(frames),
            held_out_section(log.evaluations),
            decoding,
            reset_section(frames),
            effect_section(frames),
            time_section(frames, against_plan),
            bucket_section(whole),
            order_section(whole),
            mixing_section(whole),
        ),
    )


def _training_figures(frames: RunFrames, log: RunLog) -> dict[str, Any]:
    steps, held_out = frames.steps, log.evaluations
    recent = steps.tail(max(1, len(steps) // 50))
    seconds = float(np.nansum(numbers(steps, "seconds")))
    figures: dict[str, Any] = {
        "num_attempts": steps.get_column("attempt").n_unique(),
        "loss": mean_of(recent, "loss"),
        "acceptance_length": mean_of(recent, "acceptance_length"),
        "grad_norm": median_of(recent, "grad_norm"),
        "real_tokens_per_second": share_of(total_of(steps, "num_tokens"), seconds),
        "training_seconds": seconds,
        "resets": len(frames.resets),
        "skipped_updates": total_of(steps, "skipped"),
    }
    if len(held_out):
        best = held_out.sort("loss").row(0, named=True)
        figures |= {
            "held_out_loss_first": held_out.get_column("loss")[0],
            "held_out_loss_last": held_out.get_column("loss")[-1],
            "held_out_loss_best": best["loss"],
            "best_step": best["step"],
            "held_out_acceptance_length_first": held_out.get_column("acceptance_length")[0],
            "held_out_acceptance_length_last": held_out.get_column("acceptance_length")[-1],
        }
    return {**figures, "eta_squared": {name: value.eta_squared for name, value in frames.explained.items()}}


def _identity(card: RunCard, plan: BatchPlan) -> dict[str, Any]:
    return {
        "strategy": plan.settings.get("strategy", ""),
        "target": card.target.model,
        "stores": [store.path for store in card.stores],
        "plan_fingerprint": plan.fingerprint(),
    }


def _sample_ids(card: RunCard, plan: BatchPlan) -> tuple[pl.Series | None, tuple[str, ...]]:
    """Name of every index row, if the run's stores are where they were and still the same."""
    try:
        pool = read_pool([Path(store.path) for store in card.stores])
    except StoreError as error:
        return None, (f"sample ids of resets are missing: {error}",)
    if pool.columns.fingerprint != plan.store_fingerprint:
        return None, ("sample ids of resets are missing: the store is not the one that this run was planned on",)
    return pool.sample_ids, ()
