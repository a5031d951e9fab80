"""Rows in, samples out: every input row ends as a sample or in the table of dropped rows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import Accounting
from dflash_tools.data import RowResult, sample_id
from dflash_tools.errors import DataError
from dflash_tools.extract.spool import Spool

DROPPED_NAME = "dropped.parquet"
DROPPED_SCHEMA = {"source": pl.String(), "source_row": pl.Int64(), "reason": pl.String(), "detail": pl.String()}

TOO_FEW_SUPERVISED = "too_few_supervised"
OVER_LIMIT = "over_limit"
NOT_EXTRACTED = "not_extracted"


@dataclass(frozen=True, kw_only=True, eq=False)
class Ingested:
    """All samples as columns, in input order, and where every row went.

    Attributes:
        spool: Token ids and masks, by position.
        num_tokens, num_supervised_tokens, num_valid_anchors: One entry per sample. Unit: tokens, tokens, anchors.
        sample_ids, conversation_ids: 32 hex digits each.
        sources: Name of the source of each sample.
        source_rows: Row of each sample in its source, from 1; -1 if it joins several.
        row_numbers: Which input row each sample came from, counted over all sources from 0.
        dropped: One row per input row that gave no sample, by ``DROPPED_SCHEMA``.
        accounting: kept + dropped + merged = read.
        notes: How many kept rows carry which note, e.g. truncated.
    """

    spool: Spool
    num_tokens: NDArray[np.int64]
    num_supervised_tokens: NDArray[np.int64]
    num_valid_anchors: NDArray[np.int64]
    sample_ids: list[str]
    conversation_ids: list[str]
    sources: list[str]
    source_rows: NDArray[np.int64]
    row_numbers: NDArray[np.int64]
    dropped: pl.DataFrame
    accounting: Accounting
    notes: dict[str, int]


@dataclass
class _Columns:
    num_tokens: list[int] = field(default_factory=list)
    num_supervised: list[int] = field(default_factory=list)
    num_anchors: list[int] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)
    conversation_ids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    source_rows: list[int] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    dropped: list[tuple[str, int, str, str]] = field(default_factory=list)
    status: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


def ingest(rows: Iterable[RowResult], folder: Path) -> Ingested:
    """Read all rows once; tokens go to a spool, a few numbers per sample stay in memory.

    Args:
        rows: One result per input row.
        folder: Where the spool lies while the places of samples are chosen.

    Raises:
        DataError: If no sample is left; the commonest reason is named.
    """
    spool, columns = Spool(folder), _Columns()
    try:
        for row in rows:
            _take_row(row, spool, columns)
    except BaseException:
        spool.remove()
        raise
    num_tokens = np.array(columns.num_tokens, dtype=np.int64)
    spool.close(num_tokens)
    _number_repeats(columns.sample_ids, spool)
    dropped = pl.DataFrame(columns.dropped, schema=DROPPED_SCHEMA, orient="row")
    if not len(num_tokens):
        spool.remove()
        raise DataError(_nothing_left(columns.status.total(), dropped))
    return Ingested(
        spool=spool,
        num_tokens=num_tokens,
        num_supervised_tokens=np.array(columns.num_supervised, dtype=np.int64),
        num_valid_anchors=np.array(columns.num_anchors, dtype=np.int64),
        sample_ids=columns.sample_ids,
        conversation_ids=columns.conversation_ids,
        sources=columns.sources,
        source_rows=np.array(columns.source_rows, dtype=np.int64),
        row_numbers=np.array(columns.row_numbers, dtype=np.int64),
        dropped=dropped,
        accounting=account(columns.status["kept"], columns.status["merged"], dropped),
        notes=dict(sorted(columns.notes.items())),
    )


def account(kept: int, merged: int, dropped: pl.DataFrame) -> Accounting:
    """Count rows; the dropped ones by reason, commonest first."""
    reasons = dropped.group_by("reason").len().sort(["len", "reason"], descending=[True, False])
    return Accounting(
        read=kept + merged + len(dropped),
        kept=kept,
        dropped=len(dropped),
        merged=merged,
        dropped_by_reason=dict(reasons.iter_rows()),
    )


def count_valid_anchors(loss_mask: NDArray[np.uint8]) -> int:
    """Count positions a with loss_mask[a] and loss_mask[a + 1]. Shape: (num_tokens,)."""
    return int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))


def drop_rows(
    ingested_dropped: pl.DataFrame, rows: Iterable[tuple[str, int]], reason: str, detail: str
) -> pl.DataFrame:
    """Append rows to the table of dropped ones."""
    more = [(source, row, reason, detail) for source, row in rows]
    return pl.concat([ingested_dropped, pl.DataFrame(more, schema=DROPPED_SCHEMA, orient="row")])


def _take_row(row: RowResult, spool: Spool, columns: _Columns) -> None:
    if row.status == "kept" and not any(count_valid_anchors(sample.loss_mask) for sample in row.samples):
        detail = "no two supervised tokens follow each other, so there is nothing to draft"
        columns.dropped.append((row.source, row.source_row, TOO_FEW_SUPERVISED, detail))
        columns.status["dropped"] += 1
        return
    columns.status[row.status] += 1
    columns.notes.update(row.notes)
    if row.status == "dropped":
        columns.dropped.append((row.source, row.source_row, row.reason, row.detail))
    for sample in row.samples:
        spool.append(sample.input_ids, sample.loss_mask)
        columns.num_tokens.append(len(sample.input_ids))
        columns.num_supervised.append(int(np.count_nonzero(sample.loss_mask)))
        columns.num_anchors.append(count_valid_anchors(sample.loss_mask))
        columns.sample_ids.append(sample_id(sample.input_ids, sample.loss_mask, 0))
        columns.conversation_ids.append(sample.conversation_id)
        columns.sources.append(row.source)
        columns.source_rows.append(row.source_row)
        columns.row_numbers.append(columns.status.total())


def _number_repeats(sample_ids: list[str], spool: Spool) -> None:
    """Give the second and later of equal samples ids of their own."""
    seen: Counter[str] = Counter()
    for position, name in enumerate(sample_ids):
        occurrence = seen[name]
        seen[name] += 1
        if occurrence:
            sample_ids[position] = sample_id(*spool.read(position), occurrence)


def _nothing_left(num_rows: int, dropped: pl.DataFrame) -> str:
    if not num_rows:
        return "data: the sources hold no rows at all; check data.sources or the data manifest"
    counts = dropped.group_by("reason").len().sort(["len", "reason"], descending=[True, False])
    reason, count = counts.row(0)
    first = dropped.filter(pl.col("reason") == reason).row(0, named=True)
    return (
        f"data: none of {num_rows} rows became a sample; {count} were dropped as {reason}, the first is "
        f"{first['source']} row {first['source_row']}: {first['detail']}"
    )
