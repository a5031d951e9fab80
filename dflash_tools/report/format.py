"""How a value reads: decided by the unit that its column's name carries."""

import math
from typing import Any

SHARE_WORDS = ("share", "efficiency", "eta_squared", "accuracy", "skew")
MISSING = "–"


def format_value(column: str, value: Any) -> str:
    """Write one value for a person.

    Args:
        column: Name with its unit, e.g. ``share_of_tokens``, ``data_wait_seconds``, ``num_bytes``.
        value: Number, text, bool or None.
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        # Sixteen digits tell fingerprints apart; JSON and Parquet hold all of them.
        return value[:16] if column.endswith("fingerprint") else value
    if isinstance(value, float) and not math.isfinite(value):
        return MISSING if math.isnan(value) else str(value)
    return _format_number(column, value)


def _format_number(column: str, value: float) -> str:
    if is_share(column):
        return f"{100 * value:.1f} %"
    if column.endswith("_bytes"):
        return format_bytes(value)
    if column.endswith("seconds"):
        return format_seconds(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.2e}"


def is_share(column: str) -> bool:
    """Whether a column holds fractions that read best in percent."""
    return any(word in column.split("_") or word in column for word in SHARE_WORDS)


def format_bytes(value: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def format_seconds(value: float) -> str:
    """A duration in ms, s, min or h."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:,.3g} h"


def heading(column: str) -> str:
    """A column name as a heading: words, without the prefix and suffix that only carry the unit."""
    words = column.removeprefix("num_").removesuffix("_seconds").removesuffix("_bytes")
    return words.replace("_", " ")
