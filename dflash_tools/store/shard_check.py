"""Checking one shard: its commit record, the files it names and, deeply, every value in them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.store import commit
from dflash_tools.store.arrays import TOKEN_ARRAYS, shape_of, shard_arrays
from dflash_tools.store.bf16 import all_finite
from dflash_tools.store.damage import Damage
from dflash_tools.store.direct import DirectReader
from dflash_tools.store.reader import Sample, Store
from dflash_tools.store.shard import check_shard


class ShardCheck:
    """Checks shards of one store.

    Attributes:
        num_bytes: Bytes of the shard files that the commit records seen so far name.
    """

    def __init__(self, store: Path, manifest: StoreManifest | None, index: pl.DataFrame | None, deep: bool) -> None:
        self._store = store
        self._manifest = manifest
        self._index = (
            None if index is None else index.with_row_index("row").partition_by("bucket_id", "shard_id", as_dict=True)
        )
        self._opened: Store | None = None
        if manifest is not None and index is not None:
            self._opened = Store(store, manifest, index, DirectReader(store, manifest.buckets))
        self._deep = deep
        self.num_bytes = 0

    def check(self, bucket_id: int, shard_id: int) -> list[Damage]:
        """Check one shard.

        Returns:
            What is damaged; values are looked at only if every byte is the one that was written.
        """
        rows = None if self._index is None else self._index.get((bucket_id, shard_id))
        ids = () if rows is None else tuple(rows["sample_id"].to_list())

        def hurt(file: str, problem: str, sample_ids: tuple[str, ...] = ids) -> Damage:
            return Damage(file=file, problem=problem, bucket_id=bucket_id, shard_id=shard_id, sample_ids=sample_ids)

        name = commit.record_name(bucket_id, shard_id)
        try:
            record = commit.read_record(self._store, bucket_id, shard_id)
        except StoreError as error:
            return [hurt(name, str(error))]
        if record is None:
            return [hurt(name, "missing")]
        ids = ids or tuple(sample.sample_id for sample in record.samples)
        fault = self._compare(record, rows)
        if fault is not None:
            return [hurt(name, fault, ids)]
        self.num_bytes += sum(size for size, _ in record.files.values())
        damaged = [
            hurt(file, problem, sample_ids or ids) for file, (problem, sample_ids) in self._check_files(record).items()
        ]
        if damaged or not self._deep or rows is None:
            return damaged
        return [hurt(name, problem, (sample_id,)) for sample_id, problem in self._check_values(rows)]

    def _compare(self, record: commit.CommitRecord, rows: pl.DataFrame | None) -> str | None:
        """Compare a record with index and manifest."""
        if rows is not None:
            listed = [(sample.sample_id, sample.start, sample.num_tokens) for sample in record.samples]
            if listed != rows.select("sample_id", "start", "num_tokens").rows():
                return "lists other samples than the index"
        if self._manifest is not None:
            expected = {
                spec.file_name(record.bucket_id, record.shard_id) for spec in shard_arrays(shape_of(self._manifest))
            }
            if set(record.files) != expected:
                return f"names the files {sorted(record.files)}, expected {sorted(expected)}"
            bucket = self._manifest.buckets[record.bucket_id]
            if (record.chunk_tokens, record.shard_tokens) != (bucket.chunk_tokens, bucket.shard_tokens):
                return "has other chunk or shard sizes than the manifest"
        return None

    def _check_files(self, record: commit.CommitRecord) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Damaged files of a shard: problem, and the samples that are hurt (empty = cannot be told)."""
        damaged: dict[str, tuple[str, tuple[str, ...]]] = {}
        for name, (size, checksum) in record.files.items():
            path = self._store / name
            if not path.is_file():
                damaged[name] = ("missing", ())
            elif path.stat().st_size != size:
                damaged[name] = (f"has {path.stat().st_size} bytes, {size} were written", ())
            elif self._deep:
                try:
                    found, hurt = self._read_bytes(record, name)
                except OSError as error:  # a bad sector, say
                    damaged[name] = (f"cannot be read: {error}", ())
                    continue
                if found != checksum or hurt:
                    damaged[name] = ("its bytes are not those that were written", hurt)
        return damaged

    def _read_bytes(self, record: commit.CommitRecord, name: str) -> tuple[str | None, tuple[str, ...]]:
        """Checksum of a file as it is now, and the samples whose chunks fail their own."""
        if name.split("/")[2] in {spec.name for spec in TOKEN_ARRAYS}:
            return checksum_of_file(self._store / name), ()
        # Read, not mapped: a bad sector under a map ends the process.
        data = np.fromfile(self._store / name, dtype=np.uint8)
        checksum, damaged = check_shard(data, record.shard_tokens // record.chunk_tokens)
        if checksum is None:
            return None, ()
        hurt = []
        for sample in record.samples:
            first = sample.start % record.shard_tokens // record.chunk_tokens
            if damaged[first : first - (-sample.num_tokens // record.chunk_tokens)].any():
                hurt.append(sample.sample_id)
        return checksum, tuple(hurt)

    def _check_values(self, rows: pl.DataFrame) -> Iterator[tuple[str, str]]:
        """Decode every sample and compare it with its index row; yields sample id and problem."""
        assert self._opened is not None
        for row in rows.iter_rows(named=True):
            try:
                sample = self._opened.read([row["row"]])[0]
            except StoreError as error:
                yield row["sample_id"], str(error)
                continue
            for problem in _value_problems(sample, row["num_supervised_tokens"], row["num_valid_anchors"]):
                yield row["sample_id"], problem


def _value_problems(sample: Sample, num_supervised_tokens: int, num_valid_anchors: int) -> Iterator[str]:
    for name, states in (("hidden_states", sample.hidden_states), ("last_hidden_state", sample.last_hidden_state)):
        if states is not None and not all_finite(states):
            yield f"{name} holds infinite or NaN values"
    mask = sample.loss_mask
    if np.any(mask > 1):
        yield "loss_mask holds other values than 0 and 1"
    counts = (int(mask.sum()), int((mask[:-1] & mask[1:]).sum()))
    if counts != (num_supervised_tokens, num_valid_anchors):
        yield (
            f"loss_mask has {counts[0]} supervised tokens and {counts[1]} anchors, "
            f"the index {num_supervised_tokens} and {num_valid_anchors}"
        )
    if np.any(sample.input_ids < 0):
        yield "input_ids holds negative ids"
