"""``log.jsonl`` and ``evaluation.jsonl`` as frames: read-only, also while the run still writes."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dflash_tools.contracts.record import (
    RECORD_SCHEMA_VERSION,
    BatchRecord,
    BucketEvaluation,
    EvaluationRecord,
    StepRecord,
)
from dflash_tools.contracts.run_folder import EVALUATION_FILE, LOG_FILE
from dflash_tools.errors import ResumeError

# A log is read in blocks of about this size, so that text and frames of a long run never lie in memory together.
BLOCK_BYTES = 64 << 20

_TYPES: Mapping[Any, pl.DataType] = {
    int: pl.Int64(),
    float: pl.Float64(),
    bool: pl.Boolean(),
    tuple[float, ...]: pl.List(pl.Float64()),
    tuple[int, ...]: pl.List(pl.Int64()),
}


def _schema_of(record: Any) -> dict[str, pl.DataType]:
    nested = {tuple[BatchRecord, ...]: BatchRecord, tuple[BucketEvaluation, ...]: BucketEvaluation}
    schema = {}
    for name, info in record.model_fields.items():
        inner = nested.get(info.annotation)
        schema[name] = pl.List(pl.Struct(_schema_of(inner))) if inner else _TYPES[info.annotation]
    return schema


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of a run, cleaned: one record a step.

    Attributes:
        steps: One row a step, ascending; the fields of StepRecord but ``batches``.
        batches: One row a batch, in order; the fields of BatchRecord with ``step``, ``epoch`` and ``attempt``.
        evaluations: One row an evaluation, ascending; the fields of EvaluationRecord.
        notes: What was left out and why.
    """

    steps: pl.DataFrame
    batches: pl.DataFrame
    evaluations: pl.DataFrame
    notes: tuple[str, ...]


def read_run_log(run_dir: Path) -> RunLog:
    """Read both files of a run folder; a missing file reads as an empty one.

    Raises:
        ResumeError: If the records are of another schema version.
    """
    steps, step_notes = _read_records(run_dir / LOG_FILE, StepRecord)
    steps, left_out = newest_attempts(steps)
    if left_out:
        step_notes = (*step_notes, f"{left_out:,} records of steps that a later attempt did again were left out")
    evaluations, evaluation_notes = _read_records(run_dir / EVALUATION_FILE, EvaluationRecord)
    evaluations = evaluations.sort("step", "attempt", maintain_order=True).unique("step", keep="last").sort("step")
    batches = (
        steps.select("step", "epoch", "attempt", "batches")
        .explode("batches")
        .unnest("batches")
        .drop_nulls("batch")
        .with_columns(pl.col("bucket_id").cast(pl.Int32), pl.col("epoch").cast(pl.Int32))
        .sort("batch")
    )
    return RunLog(
        steps=steps.drop("batches"),
        batches=batches,
        evaluations=evaluations,
        notes=(*step_notes, *evaluation_notes),
    )


def newest_attempts(steps: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Keep what led to the newest weights.

    An attempt that starts at step s makes every record of an earlier attempt from s on void, also those of steps it has
    not reached again yet.

    Returns:
        The records that count, ascending by step, and how many were left out.
    """
    starts = steps.group_by("attempt").agg(pl.col("step").min().alias("start")).sort("attempt", descending=True)
    # The earliest start of any later attempt: from there on an attempt's records are void.
    ends = starts.with_columns(pl.col("start").cum_min().shift(1).alias("end")).select("attempt", "end")
    kept = (
        steps.join(ends, on="attempt", how="left", maintain_order="left")
        .filter(pl.col("end").is_null() | (pl.col("step") < pl.col("end")))
        .drop("end")
        .unique("step", keep="last", maintain_order=True)
        .sort("step")
    )
    return kept, len(steps) - len(kept)


def _read_records(path: Path, record: Any) -> tuple[pl.DataFrame, tuple[str, ...]]:
    schema = _schema_of(record)
    frames, damaged, num_lines, is_torn = [pl.DataFrame(schema=schema)], [], 0, False
    for block in _blocks(path):
        whole = block.rfind(b"\n") + 1
        is_torn = whole < len(block)
        lines, bad = _parse(block[:whole], schema)
        frames.append(lines)
        damaged += [num_lines + number for number in bad]
        num_lines += block.count(b"\n")
    frame = pl.concat(frames)
    _check_version(path, frame)
    notes = [f"{path.name}: the last line is still being written and was left out"] if is_torn else []
    if damaged:
        named = ", ".join(str(number) for number in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        notes.append(f"{path.name}: lines that are no whole records were left out: {len(damaged)} (line {named})")
    return frame, tuple(notes)


def _blocks(path: Path) -> Iterator[bytes]:
    """Cut a file into blocks that end with a line, the last one wherever the file ends."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block + file.readline()


def _parse(content: bytes, schema: Mapping[str, pl.DataType]) -> tuple[pl.DataFrame, list[int]]:
    """Read whole lines. Returns the records and the numbers, from 1, of lines that are none."""
    damaged: list[int] = []
    if not content:
        return pl.DataFrame(schema=schema), damaged
    try:
        frame = pl.read_ndjson(io.BytesIO(content), schema=dict(schema))
    except pl.exceptions.PolarsError:
        content, damaged = _readable_lines(content)
        frame = pl.read_ndjson(io.BytesIO(content), schema=dict(schema)) if content else pl.DataFrame(schema=schema)
    floats = [name for name, dtype in schema.items() if dtype == pl.Float64()]
    # JSON has no NaN: a loss or norm that was not finite stands there as null.
    return frame.with_columns(pl.col(floats).fill_null(float("nan"))), damaged


def _readable_lines(content: bytes) -> tuple[bytes, list[int]]:
    """Split off lines that are no JSON objects. Returns the rest and the numbers, from 1, of those left out."""
    good, damaged = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and "step" in value:
            good.append(json.dumps(value).replace("NaN", "null").encode() + b"\n")
        else:
            damaged.append(number)
    return b"".join(good), damaged


def _check_version(path: Path, records: pl.DataFrame) -> None:
    other = records.filter(pl.col("schema_version").ne_missing(RECORD_SCHEMA_VERSION))
    if len(other):
        raise ResumeError(
            f"{path}: {len(other):,} records of schema version {other.item(0, 'schema_version')}, this version of "
            f"dflash-tools reads {RECORD_SCHEMA_VERSION}; report with the version that wrote them"
        )
