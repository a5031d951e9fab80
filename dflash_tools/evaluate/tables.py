"""The table of kinds that ``evaluate`` shows beside its figures; on stderr, so that stdout stays one JSON object."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_kinds(result: dict[str, Any]) -> None:
    """Print acceptance length and speed by kind of prompt, the steps of the gap analysis, and warnings."""
    console = Console(stderr=True)
    table = Table(title="Acceptance length by kind (bonus token counted)")
    for heading in ("kind", "prompts", "cycles", "acceptance length", "tokens/s", "plain tokens/s"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in result["by_kind"]:
        speeds = (row["tokens_per_second"], row["plain_tokens_per_second"])
        figures = (f"{row['acceptance_length']:.2f}", *(f"{speed:.1f}" for speed in speeds))
        table.add_row(row["kind"], str(row["num_prompts"]), str(row["num_cycles"]), *figures)
    console.print(table)
    for sentence in (result["gap"] or {}).get("steps", []):
        console.print(f"acceptance length {sentence}", highlight=False)
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", highlight=False)
