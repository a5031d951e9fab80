"""``report compare``: runs or plans side by side."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.run_folder import CARD_FILE, CONFIG_FILE, PLAN_FILE, read_card
from dflash_tools.errors import ConfigError
from dflash_tools.plan import statistics
from dflash_tools.plan.table import load_plan
from dflash_tools.report import composition
from dflash_tools.report.diagnosis import Finding, choose_sentences
from dflash_tools.report.document import Chart, Report, Section, Table, keep
from dflash_tools.report.format import format_value, heading
from dflash_tools.report.run_report import report_run

# Figures of a run that are compared, in this order.
_FIGURES = (
    "strategy",
    "num_planned_steps",
    "num_steps",
    "num_batches",
    "padding_efficiency",
    "equal_neighbours",
    "equal_neighbours_minimum",
    "longest_run",
    "mean_step_entropy_bits",
    "lag_1_correlation",
    "loss",
    "acceptance_length",
    "held_out_loss_last",
    "held_out_loss_best",
    "best_step",
    "held_out_acceptance_length_last",
    "resets",
    "skipped_updates",
    "real_tokens_per_second",
    "training_seconds",
)
NOTABLE = 0.01  # difference of held-out losses worth a sentence


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the things compared.

    Attributes:
        name: Short, unique.
        figures: As in its own report.
        settings: Dotted key -> value of its config.
        runs: Runs of equal buckets by length.
        curve: ``step, loss`` bucket-adjusted and thinned; no rows for a plan.
        held_out: ``step, loss, acceptance_length``; no rows for a plan.
        store: Fingerprint of what it was planned on.
    """

    name: str
    figures: Mapping[str, Any]
    settings: Mapping[str, Any]
    runs: pl.DataFrame
    curve: pl.DataFrame
    held_out: pl.DataFrame
    store: str


def report_compare(paths: Sequence[Path]) -> Report:
    """Compare run folders, or the orders in plan files.

    Args:
        paths: Run folders or ``plan.parquet`` files, two or more; the first is what the others are compared with.

    Raises:
        ConfigError: If fewer than two paths are given.
        ResumeError: If a path is neither a run nor a plan.
    """
    if len(paths) < 2:
        raise ConfigError(f"report compare: {len(paths)} path given; give at least two run folders or plan files")
    sides = [_read_side(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]
    figures = {side.name: {key: side.figures[key] for key in _FIGURES if key in side.figures} for side in sides}
    return Report(
        kind="compare",
        title="Comparison",
        subject=" · ".join(str(path) for path in paths),
        figures={"compared": figures},
        diagnosis=choose_sentences(_findings(sides)),
        sections=(
            Section(title="Figures", parts=keep(_figure_table(figures), _setting_table(sides))),
            Section(
                title="Curves",
                text=(
                    "The training loss is bucket-adjusted, so that another order of batches does not draw another "
                    "sawtooth."
                ),
                parts=keep(
                    _curve_chart(sides, "curve", "loss", "adjusted_loss", "Bucket-adjusted training loss"),
                    _curve_chart(sides, "held_out", "loss", "held_out_loss", "Held-out loss"),
                    _curve_chart(
                        sides, "held_out", "acceptance_length", "held_out_acceptance", "Held-out acceptance length"
                    ),
                ),
            ),
            Section(title="Order", parts=keep(_run_chart(sides))),
        ),
    )


def _read_side(path: Path, name: str) -> Side:
    if (path / CARD_FILE).is_file() or path.is_dir():
        return _read_run(path, name)
    plan = load_plan(path)
    config = {f"plan.{key}": value for key, value in plan.settings.items()}
    return Side(
        name=name,
        figures=_order_figures(plan),
        settings=config,
        runs=_runs(plan),
        curve=pl.DataFrame(),
        held_out=pl.DataFrame(),
        store=plan.store_fingerprint,
    )


def _read_run(path: Path, name: str) -> Side:
    card = read_card(path)
    report = report_run(path)
    plan = load_plan(path / PLAN_FILE)
    tables = {table.name: table.frame for table in report.tables}
    steps = tables.get("steps", pl.DataFrame())
    curve = pl.DataFrame()
    if len(steps):
        curve, _ = composition.thin(
            steps.select(pl.col("step").cast(pl.Float64), pl.col("adjusted_loss").alias("loss"))
        )
    held_out = tables.get("evaluations", pl.DataFrame())
    return Side(
        name=name,
        figures={**_order_figures(plan), **report.figures},
        settings=_flatten(tomllib.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))),
        runs=_runs(plan),
        curve=curve.drop_nulls() if len(curve) else curve,
        held_out=held_out.select("step", "loss", "acceptance_length") if len(held_out) else held_out,
        store=", ".join(store.fingerprint for store in card.stores),
    )


def _order_figures(plan: BatchPlan) -> dict[str, Any]:
    _, lengths = statistics.find_runs(plan.bucket_ids, plan.epochs)
    entropy = statistics.entropy_by_step(plan.bucket_ids, plan.steps)
    return {
        "strategy": str(plan.settings.get("strategy", "")),
        "num_planned_steps": plan.num_steps,
        "num_batches": len(plan),
        "equal_neighbours": statistics.count_equal_neighbours(plan.bucket_ids, plan.epochs),
        "equal_neighbours_minimum": statistics.fewest_equal_neighbours(plan.bucket_ids, plan.epochs),
        "longest_run": int(lengths.max(initial=0)),
        "mean_step_entropy_bits": float(entropy.mean()) if len(entropy) else float("nan"),
    }


def _runs(plan: BatchPlan) -> pl.DataFrame:
    return composition.run_frame(pl.DataFrame({"bucket_id": plan.bucket_ids, "epoch": plan.epochs}))


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest tails of the paths that tell them apart; equal paths get a number."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(len(one) for one in parts) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({place})" for place, path in enumerate(paths, start=1)]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _figure_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        {"figure": heading(key), **{name: format_value(key, side.get(key)) for name, side in figures.items()}}
        for key in _FIGURES
        if any(key in side for side in figures.values())
    ]
    return Table(name="figures", title="Figures", frame=pl.DataFrame(rows))


def _setting_table(sides: Sequence[Side]) -> Table:
    keys = dict.fromkeys(key for side in sides for key in side.settings)
    rows = [
        {"setting": key, **{side.name: format_value("", _plain(side.settings.get(key))) for side in sides}}
        for key in keys
        if len({repr(side.settings.get(key)) for side in sides}) > 1
    ]
    return Table(name="settings", title="Settings that differ", frame=pl.DataFrame(rows), note="– = the default.")


def _plain(value: Any) -> Any:
    return ", ".join(str(one) for one in value) if isinstance(value, list) else value


def _curve_chart(sides: Sequence[Side], frame: str, column: str, name: str, title: str) -> Chart | None:
    frames = [(side.name, getattr(side, frame)) for side in sides]
    rows = [
        one.select(pl.col("step").cast(pl.Float64), pl.col(column).cast(pl.Float64), pl.lit(label).alias("run"))
        for label, one in frames
        if len(one)
    ]
    if not rows:
        return None
    return Chart(
        name=name,
        title=title,
        description="One line a run, over steps.",
        kind="line",
        frame=pl.concat(rows),
        x="step",
        y=column,
        color="run",
    )


def _run_chart(sides: Sequence[Side]) -> Chart:
    frames = [side.runs.select("run_length", "num_runs", pl.lit(side.name).alias("order")) for side in sides]
    return Chart(
        name="run_lengths",
        title="Runs of equal buckets by length",
        description="Bars for each; vertical axis: number of runs, compressed.",
        kind="bars",
        frame=pl.concat(frames).filter(pl.col("num_runs") > 0).sort("run_length"),
        x="run_length",
        y="num_runs",
        color="order",
        titles={"run_length": "batches in a row", "num_runs": "runs"},
        log_y=True,
    )


def _findings(sides: Sequence[Side]) -> list[Finding]:
    base, *others = sides
    findings = [
        Finding(
            rule="other_store",
            weight=1.0,
            sentence=f"{other.name} is on another store than {base.name}: losses of different samples do not compare.",
        )
        for other in others
        if other.store != base.store
    ]
    return findings + [finding for other in others if (finding := _held_out_finding(base, other)) is not None]


def _held_out_finding(base: Side, other: Side) -> Finding | None:
    """Compare held-out losses at the last step that both evaluated."""
    if base.held_out.is_empty() or other.held_out.is_empty():
        return None
    both = base.held_out.join(other.held_out, on="step", suffix="_other").sort("step")
    if both.is_empty():
        return None
    last = both.row(-1, named=True)
    difference = last["loss_other"] - last["loss"]
    if abs(difference) < NOTABLE * last["loss"]:
        return None
    return Finding(
        rule="held_out",
        weight=0.5,
        sentence=(
            f"At step {last['step']:,}, the last that both evaluated, the held-out loss of {other.name} is "
            f"{last['loss_other']:.3f}, "
            f"{abs(difference):.3f} {'above' if difference > 0 else 'below'} that of {base.name}; its acceptance "
            "length is "
            f"{last['acceptance_length_other']:.3f} against {last['acceptance_length']:.3f}."
        ),
    )
