"""First look at every file: what it holds, and whether it is a sample. States are not read yet, only their shape."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.convert.cache_file import CacheFile, FileFault
from dflash_tools.convert.job import Job
from dflash_tools.convert.sample import Sample, read_sample
from dflash_tools.data import sample_id
from dflash_tools.errors import DataError
from dflash_tools.progress import Progress

NUM_READERS = 8
_FILES_AT_ONCE = 1024  # results held between two looks at them

DROPPED_SCHEMA = {"source": pl.String(), "source_row": pl.Int64(), "reason": pl.String(), "detail": pl.String()}
FILES_SCHEMA = {"source_row": pl.Int64(), "file": pl.String(), "occurrence": pl.Int32()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Scanned:
    """All files of a cache, in order of their names.

    Attributes:
        samples: One row per sample: source_row, sample_id, conversation_id and three counts.
        files: One row per file by ``FILES_SCHEMA``: its row, its name, and how many equal samples came before it.
        dropped: One row per file that is no sample, by ``DROPPED_SCHEMA``.
        used_control_token_ids: Control tokens that occur in samples, ascending.
        notes: How many samples carry which note.
    """

    samples: pl.DataFrame
    files: pl.DataFrame
    dropped: pl.DataFrame
    used_control_token_ids: tuple[int, ...]
    notes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """What is kept of one sample after the first look."""

    sample_id: str  # of a first occurrence
    conversation_id: str
    num_tokens: int
    num_supervised_tokens: int
    num_valid_anchors: int
    used_control_ids: NDArray[np.bool_]
    notes: tuple[str, ...]


@dataclass
class _Columns:
    samples: list[tuple[int, str, str, int, int, int]] = field(default_factory=list)
    files: list[tuple[int, str, int]] = field(default_factory=list)
    dropped: list[tuple[str, int, str, str]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


def scan(job: Job) -> Scanned:
    """Look at every file once.

    Raises:
        DataError: If no file is a sample; the commonest reason is named.
        ConfigError: If the options do not fit the cache.
    """
    control_ids = np.array(job.tokenizer_identity.control_token_ids, dtype=np.int64)
    columns, used = _Columns(), np.zeros(len(control_ids), dtype=bool)
    look = partial(_look_at, job, control_ids)
    with ThreadPoolExecutor(NUM_READERS) as pool, Progress("look at files", len(job.files), "files") as progress:
        progress.begin()
        for first in range(0, len(job.files), _FILES_AT_ONCE):
            files = job.files[first : first + _FILES_AT_ONCE]
            for file, found in zip(files, pool.map(look, files), strict=True):
                if isinstance(found, FileFault):
                    _drop(job, file, found, columns)
                else:
                    _keep(job, file, found, columns)
                    used |= found.used_control_ids
                progress.advance(1)
    dropped = pl.DataFrame(columns.dropped, schema=DROPPED_SCHEMA, orient="row")
    if not columns.samples:
        raise DataError(nothing_left(job, dropped))
    names = ["source_row", "sample_id", "conversation_id"]
    counts = ["num_tokens", "num_supervised_tokens", "num_valid_anchors"]
    return Scanned(
        samples=pl.DataFrame(columns.samples, schema=[*names, *counts], orient="row"),
        files=pl.DataFrame(columns.files, schema=FILES_SCHEMA, orient="row"),
        dropped=dropped,
        used_control_token_ids=tuple(control_ids[used].tolist()),
        notes=dict(sorted(columns.notes.items())),
    )


def nothing_left(job: Job, dropped: pl.DataFrame) -> str:
    """Say why no sample is left."""
    counts = dropped.group_by("reason").len().sort(["len", "reason"], descending=[True, False])
    reason, count = counts.row(0)
    first = dropped.filter(pl.col("reason") == reason).row(0, named=True)
    return (
        f"{job.source}: none of {len(job.files)} files became a sample; {count} were dropped as {reason}, the first is "
        f"{first['detail']}. Check SOURCE and --from"
    )


def _look_at(job: Job, control_ids: NDArray[np.int64], file: CacheFile) -> _Look | FileFault:
    try:
        sample = read_sample(job, file, whole=False)
    except FileFault as fault:
        return fault
    return _summarise(sample, control_ids)


def _summarise(sample: Sample, control_ids: NDArray[np.int64]) -> _Look:
    mask = sample.loss_mask
    return _Look(
        sample_id=sample_id(sample.input_ids, mask, 0),
        conversation_id=sample.conversation_id,
        num_tokens=len(sample.input_ids),
        num_supervised_tokens=int(np.count_nonzero(mask)),
        num_valid_anchors=int(np.count_nonzero(mask[:-1] & mask[1:])),
        used_control_ids=np.isin(control_ids, sample.input_ids),
        notes=sample.notes,
    )


def _drop(job: Job, file: CacheFile, fault: FileFault, columns: _Columns) -> None:
    columns.files.append((file.row, file.name, 0))
    columns.dropped.append((job.source.name, file.row, fault.reason, f"{file.name}: {fault.detail}"))


def _keep(job: Job, file: CacheFile, look: _Look, columns: _Columns) -> None:
    name = look.sample_id
    occurrence = columns.seen[name]
    columns.seen[name] += 1
    if occurrence:
        repeat = read_sample(job, file, whole=False)
        name = sample_id(repeat.input_ids, repeat.loss_mask, occurrence)
    columns.files.append((file.row, file.name, occurrence))
    columns.notes.update(look.notes)
    columns.samples.append(
        (
            file.row,
            name,
            look.conversation_id,
            look.num_tokens,
            look.num_supervised_tokens,
            look.num_valid_anchors,
        )
    )
