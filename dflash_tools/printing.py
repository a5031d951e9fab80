"""How commands show their result: one JSON object, or a short list a person can read."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel


def print_json(value: Any) -> None:
    """Print one JSON object on stdout; NaN and infinity become null, since JSON has neither."""
    typer.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def print_summary(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print the result of a command: all of it as JSON, or its single figures for a person."""
    if as_json:
        print_json(summary)
        return
    shown = {key: _show(value) for key, value in summary.items() if not _is_table(value)}
    width = max((len(key) for key in shown), default=0)
    for key, text in shown.items():
        typer.echo(f"{key.replace('_', ' '):{width}}  {text}")


def plain(value: Any) -> Any:
    """Turn paths, tuples, NumPy numbers, dataclasses and models into what JSON can hold."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(item, Mapping) for item in value)
    )


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_show(item) for item in value) or "none"
    return "none" if value is None else str(value)
