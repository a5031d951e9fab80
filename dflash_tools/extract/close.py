"""Finish a store over the shards that are there: the index shrinks to them, the other rows are told as dropped."""

from pathlib import Path

import polars as pl

from dflash_tools.contracts.manifest import BucketLayout
from dflash_tools.errors import StoreError
from dflash_tools.extract.ingest import DROPPED_NAME, NOT_EXTRACTED, account, drop_rows
from dflash_tools.extract.prepare import content_fingerprint
from dflash_tools.extract.record import ExtractionRecord, write_record
from dflash_tools.extract.tables import write_table
from dflash_tools.store.index import index_fingerprint, write_index
from dflash_tools.store.writer import StoreWriter


def close_store(store: Path, writer: StoreWriter, record: ExtractionRecord) -> tuple[StoreWriter, ExtractionRecord]:
    """Cut an unfinished store down to its committed shards. Safe to be stopped and called again.

    Args:
        store: The store's folder.
        writer: Of the store.
        record: What the store is of.

    Returns:
        Writer and record of the smaller store.

    Raises:
        StoreError: If no shard is there yet.
    """
    committed = pl.DataFrame(
        sorted(writer.committed()), schema={"bucket_id": pl.Int32(), "shard_id": pl.Int32()}, orient="row"
    )
    if not len(committed):
        raise StoreError(f"{store}: no shard is finished yet, so there is nothing to close over; run extract again")
    index = writer.index.join(committed, on=["bucket_id", "shard_id"], how="semi", maintain_order="left")
    if not record.closed:
        record = _closed_record(store, writer.index, index, record)
        write_record(store, record)
    # Once the record says so, closing goes on to its end, whatever the command of the next start.
    write_index(store, index)
    return StoreWriter(store, writer.shape, record.buckets), record


def _closed_record(store: Path, whole: pl.DataFrame, index: pl.DataFrame, record: ExtractionRecord) -> ExtractionRecord:
    row = ["source", "source_row"]
    left = (
        whole.select(row).unique(maintain_order=True).join(index.select(row), on=row, how="anti", maintain_order="left")
    )
    dropped = pl.read_parquet(store / DROPPED_NAME).filter(pl.col("reason") != NOT_EXTRACTED)
    dropped = drop_rows(dropped, left.iter_rows(), NOT_EXTRACTED, "its shard was not there when the store was closed")
    write_table(store / DROPPED_NAME, dropped)
    merged = record.accounting.merged
    counts = dict(index.group_by("bucket_id").agg(pl.len(), pl.col("num_tokens").sum()).rows_by_key("bucket_id"))
    return record.model_copy(
        update={
            "accounting": account(record.accounting.read - merged - len(dropped), merged, dropped),
            "buckets": tuple(_shrink(bucket, counts.get(bucket.bucket_id)) for bucket in record.buckets),
            "data": record.data.model_copy(
                update={"content_fingerprint": content_fingerprint(index["sample_id"].to_list())}
            ),
            "index_fingerprint": index_fingerprint(index),
            "closed": True,
        }
    )


def _shrink(bucket: BucketLayout, counts: list[tuple[int, int]] | None) -> BucketLayout:
    num_samples, num_tokens = counts[0] if counts else (0, 0)
    return bucket.model_copy(update={"num_samples": num_samples, "num_tokens": num_tokens})
