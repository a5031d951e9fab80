"""Copy states into shards: whole files are read ahead, checked, and each shard is committed before the next."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.convert.cache_file import FileFault
from dflash_tools.convert.job import Job
from dflash_tools.convert.layouts import to_bits
from dflash_tools.convert.prepare import DROPPED_NAME, FILES_NAME, write_table
from dflash_tools.convert.sample import read_sample
from dflash_tools.convert.scan import DROPPED_SCHEMA
from dflash_tools.data import sample_id
from dflash_tools.errors import StoreError
from dflash_tools.progress import Progress
from dflash_tools.store.bf16 import all_finite
from dflash_tools.store.index import write_index
from dflash_tools.store.layout import shard_write_order
from dflash_tools.store.writer import StoreWriter

NUM_READERS = 4
NOT_FINITE = "not_finite"

ShardKey = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """A sample in memory. Shapes: (T,), (T,), (T, K, H), (T, H)."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    states: NDArray[np.uint16]
    last: NDArray[np.uint16] | None


def write_shards(store: Path, job: Job, writer: StoreWriter) -> StoreWriter:
    """Make every shard that is not committed.

    Args:
        store: The store's folder.
        job: What is converted.
        writer: Of the store; its index is on disk.

    Returns:
        A writer whose index has no sample that turned out unreadable or not finite.

    Raises:
        StoreError: If a file changed since the conversion began.
        DataError: If the disk refuses to read a file; every committed shard stays.
    """
    names = pl.read_parquet(store / FILES_NAME)
    missing = _missing(writer)
    total = sum(int(writer.samples_of(*key)["num_tokens"].sum()) for key in missing)
    with Progress("convert", total, "tokens") as progress:
        progress.begin()
        for key, copies in _read_ahead(job, writer, names, missing):
            samples = writer.samples_of(*key)
            faults = {row: copy for row, copy in enumerate(copies) if isinstance(copy, FileFault)}
            if faults:
                writer = _drop_samples(store, writer, samples, faults, names)
            if len(faults) < len(copies):
                _write(writer, key, [copy for copy in copies if isinstance(copy, _Copy)])
            copies.clear()  # before the shard after the next is read
            progress.advance(int(samples["num_tokens"].sum()))
    return writer


def _missing(writer: StoreWriter) -> list[ShardKey]:
    columns = (writer.index[name].to_numpy() for name in ("bucket_id", "shard_id", "num_tokens"))
    committed = writer.committed()
    return [key for key in shard_write_order(*columns) if key not in committed]


def _read_ahead(
    job: Job, writer: StoreWriter, names: pl.DataFrame, shards: Sequence[ShardKey]
) -> Iterator[tuple[ShardKey, list[_Copy | FileFault]]]:
    """Yield the samples of one shard after another, while those of the next are being read."""
    reading: deque[tuple[ShardKey, list[Future[_Copy | FileFault]]]] = deque()
    pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read-cache")
    read = partial(_read, job, names)
    try:
        for key in shards:
            wanted = writer.samples_of(*key).select("source_row", "sample_id").rows()
            reading.append((key, [pool.submit(read, *sample) for sample in wanted]))
            if len(reading) > 1:
                yield _collect(*reading.popleft())
        while reading:
            yield _collect(*reading.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(key: ShardKey, futures: Sequence[Future[_Copy | FileFault]]) -> tuple[ShardKey, list[_Copy | FileFault]]:
    return key, [future.result() for future in futures]


def _read(job: Job, names: pl.DataFrame, source_row: int, name: str) -> _Copy | FileFault:
    """Read one file whole and make bits of its states."""
    file = job.files[source_row - 1]
    try:
        sample = read_sample(job, file, whole=True)
    except FileFault as fault:
        return fault
    occurrence = int(names["occurrence"][source_row - 1])
    if sample_id(sample.input_ids, sample.loss_mask, occurrence) != name:
        raise StoreError(
            f"{job.source / file.name}: has other token ids or another mask than when the conversion began. Restore "
            "the file, or convert into another folder"
        )
    states = to_bits(sample.states_TKH)
    last = None if sample.last_TH is None else to_bits(sample.last_TH)
    for part, bits in (("states", states), ("last hidden state", last)):
        if bits is not None and not all_finite(bits):
            return FileFault(NOT_FINITE, f"its {part} hold infinite or NaN values{_where(bits)}")
    return _Copy(input_ids=sample.input_ids, loss_mask=sample.loss_mask, states=states, last=last)


def _where(bits: NDArray[np.uint16]) -> str:
    """Name the first token, and slot, that is not finite."""
    hurt = np.argwhere((bits & 0x7F80) == 0x7F80)[0]
    slot = f", slot {hurt[1]}" if bits.ndim == 3 else ""
    return f", first at token {hurt[0]}{slot}"


def _write(writer: StoreWriter, key: ShardKey, copies: Sequence[_Copy]) -> None:
    writer.write_tokens(*key, [copy.input_ids for copy in copies], [copy.loss_mask for copy in copies])
    last = [copy.last for copy in copies if copy.last is not None]
    writer.write_shard(*key, [copy.states for copy in copies], last or None)


def _drop_samples(
    store: Path, writer: StoreWriter, samples: pl.DataFrame, faults: dict[int, FileFault], names: pl.DataFrame
) -> StoreWriter:
    """Take samples out of the index; their place on the token axis stays empty.

    The table of dropped files comes first: after a stop between the two the same samples are found again.
    """
    rows = []
    for position, fault in faults.items():
        source, source_row = samples.select("source", "source_row").row(position)
        rows.append((source, source_row, fault.reason, f"{names['file'][source_row - 1]}: {fault.detail}"))
    dropped = pl.concat(
        [pl.read_parquet(store / DROPPED_NAME), pl.DataFrame(rows, schema=DROPPED_SCHEMA, orient="row")]
    )
    write_table(store / DROPPED_NAME, dropped.unique("source_row", keep="first").sort("source_row"))
    gone = samples["sample_id"].gather(list(faults)).to_list()
    write_index(store, writer.index.filter(~pl.col("sample_id").is_in(gone)))
    return StoreWriter(store, writer.shape, writer.buckets)
