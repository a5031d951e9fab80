"""Everything before the first state is copied: places of all samples, the target folder, and ``conversion.json``."""

import io
import shutil
from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.contracts.index import TRAIN, VALIDATION
from dflash_tools.convert.check_states import check_states
from dflash_tools.convert.job import Job
from dflash_tools.convert.record import RECORD_NAME, ConversionRecord, write_record
from dflash_tools.convert.sample import read_sample
from dflash_tools.convert.scan import Scanned, scan
from dflash_tools.data import choose_split
from dflash_tools.errors import StoreError
from dflash_tools.plan.buckets import assign_buckets, choose_edges
from dflash_tools.progress import say
from dflash_tools.store.arrays import METADATA_NAME
from dflash_tools.store.commit import RECORDS_FOLDER
from dflash_tools.store.files import TEMP_SUFFIX, sync_folder, write_file
from dflash_tools.store.index import INDEX_NAME, INDEX_SCHEMA, write_index
from dflash_tools.store.layout import Layout, build_layout
from dflash_tools.store.lock import LOCK_NAME
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.writer import StoreWriter
from dflash_tools.target.folder import write_target_folder
from dflash_tools.target.load import Target, load_target

DROPPED_NAME = "dropped.parquet"
FILES_NAME = "files.parquet"
TARGET_NAME = "target"
# Forward batches of the target: none are run here, but a shard never gets smaller than one.
FORWARD_TOKEN_BUDGET = 16384
SPARE_BYTES = 64 << 20  # commit records, index, target folder

OWN_NAMES = {
    "buckets",
    DROPPED_NAME,
    FILES_NAME,
    INDEX_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    RECORDS_FOLDER,
    RECORD_NAME,
    TARGET_NAME,
}


def check_folder(store: Path) -> None:
    """Refuse a folder with foreign files.

    Raises:
        StoreError: Naming one of them.
    """
    for path in sorted(store.iterdir()):
        if path.name.removesuffix(TEMP_SUFFIX) not in OWN_NAMES:
            raise StoreError(f"{store}: holds {path.name}, which no conversion writes; give an empty or a new folder")


def prepare(store: Path, job: Job) -> ConversionRecord:
    """Look at all files, choose the place of every sample, and write what does not need the states.

    Raises:
        DataError, ConfigError: If the cache, the options and the target do not fit each other.
        StoreError: If the folder is not empty, or the states will not fit on the disk.
    """
    check_folder(store)
    scanned = scan(job)
    index, layout = choose_places(job, scanned)
    target = load_target(job.options.target)
    _check_first_sample(job, scanned, target)
    _write_target(store, job, target)
    write_index(store, index)
    write_table(store / DROPPED_NAME, scanned.dropped)
    write_table(store / FILES_NAME, scanned.files)
    writer = StoreWriter(store, job.shape, layout.buckets)
    writer.create_arrays()
    _check_space(writer)
    record = ConversionRecord(
        settings=job.settings,
        versions=job.versions,
        target=target.identity,
        tokenizer=job.tokenizer_identity.model_copy(update={"used_control_token_ids": scanned.used_control_token_ids}),
        num_files=len(job.files),
        notes=scanned.notes,
        buckets=layout.buckets,
    )
    write_record(store, record)
    return record


def choose_places(job: Job, scanned: Scanned) -> tuple[pl.DataFrame, Layout]:
    """Choose split, bucket, shard and position of every sample from lengths and conversation ids alone.

    Raises:
        DataError: If the validation split would leave nothing to train on.
    """
    samples = scanned.samples
    num_tokens = samples["num_tokens"].to_numpy().astype(np.int32)
    edges = choose_edges(num_tokens, job.options.num_buckets)
    bucket_ids = assign_buckets(num_tokens, edges)
    layout = build_layout(
        num_tokens,
        bucket_ids,
        edges.tolist(),
        bytes_per_token=job.shape.bytes_per_token,
        codec=job.shape.codec,
        forward_token_budget=FORWARD_TOKEN_BUDGET,
    )
    held_out = choose_split(samples["conversation_id"].to_list(), job.options.validation_fraction)
    index = samples.with_columns(
        pl.lit(job.source.name).alias("source"),
        pl.Series("split", np.where(held_out, VALIDATION, TRAIN).tolist(), dtype=pl.String()),
        pl.Series("bucket_id", bucket_ids),
        pl.Series("shard_id", layout.shard_ids),
        pl.Series("forward_id", layout.forward_ids),
        pl.Series("start", layout.starts),
    )
    return index.select(pl.col(name).cast(dtype) for name, dtype in INDEX_SCHEMA.items())[layout.row_order], layout


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a frame as Parquet, whole or not at all; equal frames give equal bytes."""
    buffer = io.BytesIO()
    table.rechunk().write_parquet(buffer, compression="zstd", compression_level=3, statistics=False)
    write_file(path, [buffer.getvalue()])


def _check_first_sample(job: Job, scanned: Scanned, target: Target) -> None:
    """Run the target over the first sample and compare: layers and norm state are those that the options say."""
    file = job.files[int(scanned.samples["source_row"][0]) - 1]
    errors = check_states(target, read_sample(job, file, whole=False), job.layer_ids, job.last_norm, file.name)
    words = ", ".join(f"{layer}: {error:.2g}" for layer, error in zip(job.layer_ids, errors, strict=True))
    say(f"{file.name} agrees with the target; relative difference of its states by layer: {words}")


def _write_target(store: Path, job: Job, target: Target) -> None:
    """Write STORE/target, whole or not at all."""
    temp, folder = store / f"{TARGET_NAME}{TEMP_SUFFIX}", store / TARGET_NAME
    for path in (temp, folder):
        if path.exists():
            shutil.rmtree(path)
    write_target_folder(target, job.tokenizer, temp)
    for path in temp.rglob("*"):
        # Opening a folder or a file to read is enough to have it synced.
        sync_folder(path)
    sync_folder(temp)
    temp.rename(folder)
    sync_folder(store)


def _check_space(writer: StoreWriter) -> None:
    """Refuse to start what will not fit; lossless is counted as if it did not compress."""
    needed = int(writer.index["num_tokens"].sum()) * writer.shape.bytes_per_token
    free = writer.free_bytes()
    if writer.shape.codec == "none" and needed + SPARE_BYTES > free:
        raise StoreError(
            f"{writer.store}: the states need about {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; give a "
            "folder on a larger disk, or --codec lossless (about 1.4 times smaller) or --hidden-states-dtype fp8"
        )
