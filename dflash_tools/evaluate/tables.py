"""The tables that ``evaluate`` shows beside its figures; on stderr, so that stdout stays one JSON object."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_tables(result: dict[str, Any]) -> None:
    """Print acceptance length and speed by kind of prompt, the steps of the gap analysis, and warnings."""
    console = Console(stderr=True)
    console.print(_kinds(result["by_kind"]))
    if result["gap_steps"]:
        console.print(_gap(result["gap_steps"]))
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)


def _kinds(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Acceptance length by kind (bonus token counted)")
    for heading in ("kind", "prompts", "cycles", "acceptance length", "tokens/s", "plain tokens/s"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        speeds = (row["tokens_per_second"], row["plain_tokens_per_second"])
        figures = (f"{row['acceptance_length']:.2f}", *(f"{speed:.1f}" for speed in speeds))
        table.add_row(row["kind"], str(row["num_prompts"]), str(row["num_cycles"]), *figures)
    return table


def _gap(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="From the training estimate to decoding")
    for heading in ("before", "after", "change", "what changes"):
        table.add_column(heading, justify="left" if heading == "what changes" else "right")
    for row in rows:
        before, after = row["before"], row["after"]
        table.add_row(f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}", row["change"])
    return table
