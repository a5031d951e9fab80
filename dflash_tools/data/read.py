"""All rows of all sources, in order: each ends as a result that says where it went."""

import os
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from dflash_tools.data.duplicates import SeenKeys
from dflash_tools.data.manifest import ResolvedData, ResolvedSource
from dflash_tools.data.raw import RawRow
from dflash_tools.data.rows import RowOutcome, RowReader
from dflash_tools.data.sample import RowResult
from dflash_tools.data.sources import read_source
from dflash_tools.data.workers import read_in_processes
from dflash_tools.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 256
CHUNK_BYTES = 4 << 20
# Starting processes takes a second or two: it pays from this much work on.
BYTES_FOR_PROCESSES = 64 << 20

Row = tuple[ResolvedSource, str, RawRow]


def read_rows(
    data: ResolvedData,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    strict: bool = False,
    num_processes: int | None = None,
) -> Iterator[RowResult]:
    """Read every row of every source.

    Only a few hundred rows are held at a time, whatever the size of the files.

    Args:
        data: From resolve_data.
        tokenizer: From load_tokenizer.
        strict: The first row that is dropped for a fault of its own stops the reading.
        num_processes: Processes that render and tokenise; None = all cores this process may use.

    Yields:
        One result per row, in the order of the sources and of the rows in them, whatever the number of processes.

    Raises:
        DataError: If a file cannot be read, conversations meet a tokenizer without chat template, a row is too long
            under ``too_long = "error"``, or a row is dropped under ``strict``.
    """
    reader = RowReader(data, tokenizer)
    if num_processes is None:
        num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chunks = _chunks(data)
    first = _take(chunks, BYTES_FOR_PROCESSES) if num_processes > 1 else []
    chunks = chain(first, chunks)
    if sum(map(_work, first)) >= BYTES_FOR_PROCESSES:
        outcomes = read_in_processes(reader, chunks, num_processes)
    else:
        outcomes = ((chunk, reader.read_many([(row, source.loss_on) for source, _, row in chunk])) for chunk in chunks)
    seen = SeenKeys()
    for chunk, chunk_outcomes in outcomes:
        for (source, file_name, row), outcome in zip(chunk, chunk_outcomes, strict=True):
            result = _result(data, source, file_name, row, outcome, seen)
            _stop_if_told(result, data, strict)
            yield result


def _chunks(data: ResolvedData) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    num_bytes = 0
    for source in data.sources:
        for file_name, row in read_source(source):
            chunk.append((source, file_name, row))
            num_bytes += _bytes_of(row)
            if len(chunk) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _take(chunks: Iterator[list[Row]], num_bytes: int) -> list[list[Row]]:
    """Take chunks until they hold so many bytes, or there are no more."""
    taken: list[list[Row]] = []
    while num_bytes > 0 and (chunk := next(chunks, None)):
        taken.append(chunk)
        num_bytes -= _work(chunk)
    return taken


def _work(chunk: list[Row]) -> int:
    return sum(_bytes_of(row) for _, _, row in chunk)


def _bytes_of(row: RawRow) -> int:
    # A row has a cost of its own beside its text, and a columnar reader does not say how long that is.
    return 1024 + (len(row.content) if isinstance(row.content, bytes) else 0)


def _result(
    data: ResolvedData, source: ResolvedSource, file_name: str, row: RawRow, outcome: RowOutcome, seen: SeenKeys
) -> RowResult:
    reason, detail, notes = outcome.reason, outcome.detail, set(outcome.notes)
    samples = outcome.samples
    if not reason and seen.add(outcome.key):
        if data.duplicates == "drop":
            reason, detail = "duplicate", "a row before this one has the same token ids and loss mask"
        else:
            notes.add("duplicate")
    if not reason and source.weight != 1.0:
        samples = samples * num_copies(source.weight, samples[0].conversation_id)
        if not samples:
            reason, detail = "not_sampled", f"left out by the source's weight {source.weight}"
    return RowResult(
        source=file_name,
        source_row=row.source_row,
        status="dropped" if reason else "kept",
        samples=() if reason else tuple(samples),
        reason=reason,
        detail=detail,
        notes=tuple(sorted(notes)),
    )


def num_copies(weight: float, conversation_id: str) -> int:
    """Turn a weight into a number of copies; the fraction is drawn by other digits of the hash than the split."""
    whole = int(weight)
    return whole + (int(conversation_id[16:31], 16) < (weight - whole) * (1 << 60))


def _stop_if_told(result: RowResult, data: ResolvedData, strict: bool) -> None:
    if not result.reason or result.reason in ("duplicate", "not_sampled"):
        return
    where = f"{result.source}:{result.source_row}: {result.reason}: {result.detail}"
    if result.reason == "too_long" and data.too_long == "error":
        raise DataError(f"{where}; raise data.max_tokens, or set data.too_long to truncate or drop")
    if strict:
        raise DataError(f"{where}; correct the row, or run without --strict to drop such rows and have them counted")
