"""The end of a conversion: the manifest, and the figures that a command prints."""

from pathlib import Path
from typing import Any

import polars as pl

from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.manifest import Accounting, BucketLayout, DataIdentity, StoreManifest
from dflash_tools.convert.job import Job
from dflash_tools.convert.prepare import DROPPED_NAME, FORWARD_TOKEN_BUDGET, write_table
from dflash_tools.convert.record import ConversionRecord
from dflash_tools.convert.scan import nothing_left
from dflash_tools.errors import DataError
from dflash_tools.store.writer import StoreWriter


def finish_store(store: Path, job: Job, writer: StoreWriter, record: ConversionRecord) -> StoreManifest:
    """Write the manifest: from here on the store is complete.

    Args:
        store: The store's folder.
        job: What was converted.
        writer: With every shard of the index committed.
        record: What the store is of.

    Raises:
        DataError: If no sample is left.
    """
    index, dropped = writer.index, _settle_dropped(store, writer.index)
    if not len(index):
        raise DataError(nothing_left(job, dropped))
    counts = dict(index.group_by("bucket_id").agg(pl.len(), pl.col("num_tokens").sum()).rows_by_key("bucket_id"))
    buckets = tuple(_recount(bucket, counts.get(bucket.bucket_id)) for bucket in record.buckets)
    writer = StoreWriter(store, job.shape, buckets)
    writer.create_arrays()
    return writer.finish(
        StoreManifest(
            target=record.target,
            target_layer_ids=job.layer_ids,
            hidden_size=job.target.hidden_size,
            hidden_states_dtype=job.shape.hidden_states_dtype,
            codec=job.shape.codec,
            last_hidden_state=job.last_norm,
            tokenizer=record.tokenizer,
            data=DataIdentity(
                name=f"converted from {record.settings['--from']}",
                sources=(job.source.name,),
                content_fingerprint=fingerprint_of_json(index["sample_id"].to_list()),
                chat_template_kwargs={},
                max_tokens=int(index["num_tokens"].to_numpy().max()),
                too_long="as cached",
                loss_on="all" if job.supervise_all else "as cached",
                validation_fraction=job.options.validation_fraction,
            ),
            accounting=_account(record.num_files, dropped),
            buckets=buckets,
            num_samples=len(index),
            num_tokens=int(index["num_tokens"].sum()),
            num_supervised_tokens=int(index["num_supervised_tokens"].sum()),
            num_bytes=0,
            forward_token_budget=FORWARD_TOKEN_BUDGET,
            threads=0,  # no forward was run
            index_fingerprint="",
            versions=record.versions,
            files={},
        )
    )


def summarise(store: Path, job: Job, manifest: StoreManifest, record: ConversionRecord) -> dict[str, Any]:
    """Figures of a finished store, as ``convert`` prints them."""
    accounting = manifest.accounting
    return {
        "store": str(store),
        "read": accounting.read,
        "kept": accounting.kept,
        "dropped": accounting.dropped,
        "dropped_by_reason": accounting.dropped_by_reason,
        "notes": record.notes,
        "other_files": job.num_other_files,
        "num_samples": manifest.num_samples,
        "num_tokens": manifest.num_tokens,
        "num_supervised_tokens": manifest.num_supervised_tokens,
        "target_layer_ids": list(manifest.target_layer_ids),
        "last_hidden_state": manifest.last_hidden_state,
        "num_bytes": manifest.num_bytes,
        "num_shards": sum(bucket.num_shards for bucket in manifest.buckets),
        "fingerprint": manifest.fingerprint(),
    }


def _settle_dropped(store: Path, index: pl.DataFrame) -> pl.DataFrame:
    """The dropped files; one that was mended after a stop and then taken is none of them any more."""
    told = pl.read_parquet(store / DROPPED_NAME)
    dropped = told.join(index, on="source_row", how="anti", maintain_order="left")
    if len(dropped) < len(told):
        write_table(store / DROPPED_NAME, dropped)
    return dropped


def _recount(bucket: BucketLayout, counts: list[tuple[int, int]] | None) -> BucketLayout:
    num_samples, num_tokens = counts[0] if counts else (0, 0)
    return bucket.model_copy(update={"num_samples": num_samples, "num_tokens": num_tokens})


def _account(num_files: int, dropped: pl.DataFrame) -> Accounting:
    reasons = dropped.group_by("reason").len().sort(["len", "reason"], descending=[True, False])
    return Accounting(
        read=num_files,
        kept=num_files - len(dropped),
        dropped=len(dropped),
        merged=0,
        dropped_by_reason=dict(reasons.iter_rows()),
    )
