"""``report plan``: what a run would do, from the index alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.config import PlanSettings, TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.errors import ConfigError
from dflash_tools.plan import build_plan
from dflash_tools.plan.statistics import batch_lengths
from dflash_tools.plan.stores import plan_stores
from dflash_tools.report import composition, plan_sections
from dflash_tools.report.composition import SampleColumns
from dflash_tools.report.composition_sections import bucket_section, compose, mixing_section, order_section
from dflash_tools.report.diagnosis import choose_sentences
from dflash_tools.report.document import Report, share_of
from dflash_tools.report.order import order_facts
from dflash_tools.report.plan_rules import LOW_EFFICIENCY, PlanFacts, plan_findings
from dflash_tools.report.sources import read_pool


def report_plan(config: TrainConfig, stores: Sequence[Path]) -> Report:
    """Make the plan of a run and report on it; reads index and manifest, no array.

    Raises:
        ConfigError: If the plan cannot be made with these settings, or holds no sample.
        StoreError: If a store is missing, unfinished or damaged.
    """
    pool = read_pool(stores)
    plan = plan_stores(pool.columns, config.plan, config.loss)
    subject = ", ".join(str(store) for store in stores)
    if not len(plan):
        raise ConfigError(f"{subject}: no training sample to plan; report store shows the splits. Extract more data")
    return _report(plan, pool.samples(config.loss), config, subject)


def _report(plan: BatchPlan, samples: SampleColumns, config: TrainConfig, subject: str) -> Report:
    rows = np.unique(plan.sample_rows)
    whole = compose(composition.frame_of_plan(plan, samples))
    weights = plan_sections.weight_frame(plan, samples, config.drafter.block_size)
    limits = plan_sections.limit_frame(plan, samples, whole.batches)
    facts = PlanFacts(
        composition=whole,
        order=order_facts(plan),
        settings=config.plan,
        weights=weights,
        limits=limits,
        left_out=plan.left_out,
        num_without_anchor=int((samples.num_anchors[rows] == 0).sum()),
        sorted_efficiency=_sorted_efficiency(rows, samples, config.plan)
        if whole.padding_efficiency < LOW_EFFICIENCY
        else whole.padding_efficiency,
    )
    lengths = plan_sections.length_chart(samples.num_tokens[rows])
    return Report(
        kind="plan",
        title="Plan of a run",
        subject=subject,
        figures={
            "strategy": config.plan.strategy,
            "num_samples": len(rows),
            **whole.figures(),
            "slot_efficiency": _slot_efficiency(weights),
            **plan_sections.mate_figures(plan),
            "left_out": dict(plan.left_out),
            "plan_fingerprint": plan.fingerprint(),
        },
        diagnosis=choose_sentences(plan_findings(facts)),
        sections=(
            bucket_section(whole, (plan_sections.limit_table(limits), lengths)),
            plan_sections.weight_section(weights),
            order_section(whole),
            mixing_section(
                whole,
                (
                    plan_sections.depletion_table(whole.batches),
                    plan_sections.rank_table(whole.batches, config.plan.batches_per_step),
                ),
            ),
        ),
    )


def _slot_efficiency(weights: pl.DataFrame) -> float:
    """Drafted slots that carry a label, of the whole plan."""
    filled = (weights.get_column("slot_efficiency") * weights.get_column("num_anchors")).sum()
    return share_of(float(filled), float(weights.get_column("num_anchors").sum()))


def _sorted_efficiency(rows: NDArray[np.int64], samples: SampleColumns, settings: PlanSettings) -> float:
    """Padding efficiency of an epoch whose buckets are sorted whole: the best that plan.sort_window can give."""
    whole_buckets = PlanSettings(
        strategy="sequential",
        sort_window=len(rows),
        num_epochs=1,
        token_budget=settings.token_budget,
        anchor_budget=settings.anchor_budget,
        max_batch_size=settings.max_batch_size,
        too_long=settings.too_long,
    )
    best = build_plan(samples.num_tokens[rows], samples.bucket_ids[rows], whole_buckets, samples.num_anchors[rows])
    lengths = batch_lengths(best, samples.num_tokens[rows])
    return share_of(int(lengths.num_tokens.sum()), int(lengths.num_padded_tokens.sum()))
