"""What ``evaluate`` measured on a run: true acceptance lengths by decoding, from ``RUN/evaluate/*.json``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dflash_tools.report.document import Chart, Section, Table, keep

RESULTS_DIR = "evaluate"
_GAP = {
    "estimated_in_training": "estimated in training",
    "uniform_anchors_on_data": "drawn anchors, given text",
    "decode_anchors_on_data": "anchors of decoding, given text",
    "uniform_anchors_on_own_text": "drawn anchors, own text",
    "true": "decoding",
}


def read_results(run: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Read the results of a run in the order of their names; notes name files that cannot be read."""
    results, notes = [], []
    for path in sorted((run / RESULTS_DIR).glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            notes.append(f"{RESULTS_DIR}/{path.name}: no valid JSON, left out")
            continue
        results.append({"name": path.stem, **result})
    return results, tuple(notes)


def decoding_section(results: Sequence[dict[str, Any]]) -> Section:
    """True acceptance length, speed, acceptance by position, and where the estimate of training differs."""
    return Section(
        title="Decoding with the target",
        text="" if results else "Not measured yet: dflash-tools evaluate RUN.",
        parts=keep(
            Table(
                name="decoded",
                title="True acceptance length (bonus token counted)",
                frame=pl.DataFrame([_row(result) for result in results], infer_schema_length=None),
                note="Low and high: interval over prompts. Identical: the text equals plain greedy decoding.",
            ),
            Chart(
                name="acceptance_by_position",
                title="Share of cycles that accept a position",
                description="Position 1 is the first drafted token; groups are evaluations.",
                kind="bars",
                frame=pl.DataFrame(
                    [
                        {"position": place, "share_of_cycles": share, "evaluation": result["name"]}
                        for result in results
                        for place, share in enumerate(result.get("acceptance_by_position") or (), start=1)
                    ]
                ),
                x="position",
                y="share_of_cycles",
                color="evaluation",
                titles={"share_of_cycles": "share of cycles"},
            ),
            Chart(
                name="acceptance_gap",
                title="From the estimate of training to decoding",
                description="Acceptance length at other anchors and on other text; groups are evaluations.",
                kind="bars",
                frame=pl.DataFrame(
                    [
                        {"measured": words, "acceptance_length": length, "evaluation": result["name"]}
                        for result in results
                        for key, words in _GAP.items()
                        if (length := (result.get("gap") or {}).get(key)) is not None
                    ]
                ),
                x="measured",
                y="acceptance_length",
                color="evaluation",
            ),
        ),
    )


def _row(result: dict[str, Any]) -> dict[str, Any]:
    low, high = result.get("acceptance_interval") or (None, None)
    identical = result.get("identical")
    return {
        "step": result.get("step"),
        "prompts": result.get("prompts"),
        "dtype": result.get("dtype"),
        "temperature": result.get("temperature"),
        "num_draft_tokens": result.get("num_draft_tokens"),
        "acceptance_length": result.get("acceptance_length"),
        "low": low,
        "high": high,
        "estimated_in_training": (result.get("gap") or {}).get("estimated_in_training"),
        "tokens_per_second": result.get("tokens_per_second"),
        "plain_tokens_per_second": result.get("plain_tokens_per_second"),
        "identical": None if identical is None else "yes" if identical else "no",
    }
