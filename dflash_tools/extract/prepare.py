"""Everything before the target loads: rows, places, index, token ids and masks of all shards."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.data import read_rows
from dflash_tools.errors import ConfigError, StoreError
from dflash_tools.extract.estimate import check_space, estimate_buckets
from dflash_tools.extract.ingest import DROPPED_NAME, Ingested, ingest
from dflash_tools.extract.job import Job
from dflash_tools.extract.places import Places, choose_places
from dflash_tools.extract.record import ExtractionRecord, write_record
from dflash_tools.extract.settings import data_identity
from dflash_tools.extract.tables import write_table
from dflash_tools.store.index import index_fingerprint, write_index
from dflash_tools.store.writer import StoreWriter

PREPARING_NAME = "preparing"


def prepare(
    store: Path, job: Job, *, strict: bool, threads: int, earlier: ExtractionRecord | None = None
) -> ExtractionRecord:
    """Write index, dropped rows, arrays and tokens, and then ``extraction.json``.

    Args:
        store: The store's folder; committed shards in it are kept.
        job: What to extract.
        strict: Stop at the first row that would be dropped.
        threads: CPU threads that the forward will use.
        earlier: The record of a store that is being repaired: the data must still give its index.

    Raises:
        StoreError: If the states will not fit on the disk, or the data no longer gives the earlier index.
        DataError, ConfigError: If data or settings do not fit.
    """
    ingested = ingest(read_rows(job.data, job.tokenizer, strict=strict), store / PREPARING_NAME)
    try:
        places = choose_places(ingested, job)
        fingerprint = index_fingerprint(places.index)
        if earlier is not None and fingerprint != earlier.index_fingerprint:
            raise StoreError(
                f"{store}: the data gives another index than the one the store was made of, so it cannot be repaired "
                "from them; restore the data, or extract anew with --overwrite"
            )
        if earlier is None:
            buckets = estimate_buckets(
                places.index["num_tokens"].to_numpy(),
                places.index["bucket_id"].to_numpy(),
                places.layout.buckets,
                job.shape,
            )
            check_space(store, sum(bucket.num_bytes for bucket in buckets), job.shape)
        write_index(store, places.index)
        write_table(store / DROPPED_NAME, places.dropped)
        writer = StoreWriter(store, job.shape, places.layout.buckets)
        writer.create_arrays()
        used_ids = _write_tokens(writer, ingested, places, job)
    finally:
        ingested.spool.remove()
    record = _record(job, ingested, places, fingerprint, used_ids, earlier.threads if earlier else threads)
    if earlier is not None:
        record = record.model_copy(update={"versions": earlier.versions})
    write_record(store, record)
    return record


def content_fingerprint(sample_ids: list[str]) -> str:
    """Identity of the cached data: sample ids in row order. Returns 64 hex digits."""
    return fingerprint_of_json(sample_ids)


def _write_tokens(writer: StoreWriter, ingested: Ingested, places: Places, job: Job) -> tuple[int, ...]:
    """Write ids and masks of every shard that is not committed; returns the control tokens that occur."""
    committed = writer.committed()
    control_ids = np.array(job.tokenizer_identity.control_token_ids, dtype=np.int64)
    used = np.zeros(len(control_ids), dtype=bool)
    for bucket_id, shard_id in writer.shards():
        tokens = [ingested.spool.read(int(places.positions[row])) for row in writer.rows_of(bucket_id, shard_id)]
        ids = [input_ids for input_ids, _ in tokens]
        used |= np.isin(control_ids, np.concatenate(ids))
        if (bucket_id, shard_id) in committed:
            continue
        _check_ids(ids, job.target.vocab_size)
        writer.write_tokens(bucket_id, shard_id, ids, [mask for _, mask in tokens])
    return tuple(control_ids[used].tolist())


def _check_ids(input_ids: list[NDArray[np.int32]], vocab_size: int) -> None:
    largest = max(int(ids.max()) for ids in input_ids)
    if largest >= vocab_size:
        raise ConfigError(
            f"target.model: the tokenizer gives token id {largest}, but the target has only {vocab_size} embedding "
            "rows; they do not belong together"
        )


def _record(
    job: Job, ingested: Ingested, places: Places, fingerprint: str, used_ids: tuple[int, ...], threads: int
) -> ExtractionRecord:
    return ExtractionRecord(
        settings=job.settings,
        versions=job.versions,
        threads=threads,
        target_layer_ids=job.layer_ids,
        hidden_size=job.target.hidden_size,
        tokenizer=job.tokenizer_identity.model_copy(update={"used_control_token_ids": used_ids}),
        data=data_identity(job.data, content_fingerprint(places.index["sample_id"].to_list())),
        accounting=places.accounting,
        notes=ingested.notes,
        buckets=places.layout.buckets,
        index_fingerprint=fingerprint,
    )
