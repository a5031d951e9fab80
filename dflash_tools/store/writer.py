"""Writing a store: metadata, token arrays, whole shards with their commit records, and the manifest last."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.manifest import BucketLayout, StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.store import commit
from dflash_tools.store.arrays import (
    CRC_BYTES,
    INPUT_IDS,
    LOSS_MASK,
    TOKEN_ARRAYS,
    ArraySpec,
    StoreShape,
    metadata_files,
    shard_arrays,
    state_arrays,
)
from dflash_tools.store.bf16 import all_finite
from dflash_tools.store.files import TEMP_SUFFIX, files_below, make_folder, write_file
from dflash_tools.store.fp8 import encode_fp8, measure_error, relative_errors
from dflash_tools.store.index import index_fingerprint, read_index, rows_by_shard
from dflash_tools.store.lock import LOCK_NAME
from dflash_tools.store.manifest_file import MANIFEST_NAME, write_manifest
from dflash_tools.store.shard import NonFiniteStates, ShardEncoder, encode_plain


class StoreWriter:
    """Writes one store. Different shards may be written by different threads or processes; a shard by one.

    The index must be on disk before a writer is made: it says which samples each shard holds, in which order.
    """

    def __init__(self, store: Path, shape: StoreShape, buckets: Sequence[BucketLayout]) -> None:
        self.store = store
        self.shape = shape
        self.buckets = tuple(buckets)
        self.index = read_index(store)
        self._rows = rows_by_shard(self.index)

    def create_arrays(self) -> None:
        """Write the groups and arrays, without any shard; the same bytes again if they are there."""
        make_folder(self.store / commit.RECORDS_FOLDER)
        for name, content in metadata_files(self.shape, self.buckets).items():
            path = self.store / name
            make_folder(path.parent)
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, [content])

    def shards(self) -> list[tuple[int, int]]:
        """(bucket_id, shard_id) of every shard that the index asks for, ascending."""
        return sorted(self._rows)

    def committed(self) -> set[tuple[int, int]]:
        """(bucket_id, shard_id) of every finished shard."""
        return commit.committed_shards(self.store)

    def samples_of(self, bucket_id: int, shard_id: int) -> pl.DataFrame:
        """Index rows of one shard, in the order in which its samples must be given."""
        first, stop = self._rows[bucket_id, shard_id]
        return self.index.slice(first, stop - first)

    def rows_of(self, bucket_id: int, shard_id: int) -> range:
        """Sample rows of one shard."""
        return range(*self._rows[bucket_id, shard_id])

    def write_tokens(
        self,
        bucket_id: int,
        shard_id: int,
        input_ids: Sequence[NDArray[np.int32]],
        loss_masks: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Write token ids and loss masks of a shard, before its states are known.

        Args:
            bucket_id: Bucket of the shard.
            shard_id: Shard inside the bucket.
            input_ids: One array per sample of ``samples_of``. Shape of each: (num_tokens,).
            loss_masks: Likewise; 1 = the token is supervised.
        """
        samples = self.samples_of(bucket_id, shard_id)
        starts = self._starts(samples, bucket_id, shard_id)
        given: list[tuple[ArraySpec, Sequence[NDArray[Any]]]] = [(INPUT_IDS, input_ids), (LOSS_MASK, loss_masks)]
        for spec, columns in given:
            self._check_lengths(samples, columns, spec.name)
            rows = np.zeros(self.buckets[bucket_id].shard_tokens, dtype=spec.dtype)
            for start, values in zip(starts, columns, strict=True):
                rows[start : start + len(values)] = values
            write_file(self.store / spec.file_name(bucket_id, shard_id), encode_plain(rows))

    def read_tokens(self, bucket_id: int, shard_id: int) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Read back what ``write_tokens`` wrote: token ids and loss mask of each sample of a shard.

        Raises:
            StoreError: If the files are missing or damaged.
        """
        columns: list[NDArray[Any]] = []
        for spec in TOKEN_ARRAYS:
            path = self.store / spec.file_name(bucket_id, shard_id)
            if not path.is_file():
                raise StoreError(f"{path}: missing; run extract again, it writes token ids before any state")
            content = np.fromfile(path, dtype=np.uint8)
            rows = content[:-CRC_BYTES].view(spec.dtype)
            if encode_plain(rows)[1] != content[-CRC_BYTES:].tobytes():
                raise StoreError(f"{path}: fails its checksum; remove it and run extract again")
            columns.append(rows)
        samples = self.samples_of(bucket_id, shard_id)
        starts = self._starts(samples, bucket_id, shard_id)
        return [
            (columns[0][start : start + length], columns[1][start : start + length])
            for start, length in zip(starts, samples["num_tokens"].to_list(), strict=True)
        ]

    def write_shard(
        self,
        bucket_id: int,
        shard_id: int,
        hidden_states: Sequence[NDArray[np.uint16]],
        last_hidden_states: Sequence[NDArray[np.uint16]] | None = None,
        *,
        split_forward_ids: Sequence[int] = (),
    ) -> commit.CommitRecord:
        """Write the states of a shard and commit it, its token arrays included.

        Args:
            bucket_id: Bucket of the shard.
            shard_id: Shard inside the bucket.
            hidden_states: bfloat16 bits of each sample of ``samples_of``. Shape of each: (num_tokens, layer, hidden).
            last_hidden_states: Likewise, shape (num_tokens, hidden), if the store keeps them.
            split_forward_ids: Forward batches that had to be cut for lack of memory.

        Raises:
            StoreError: If a value is infinite or NaN; the sample is named.
            OSError: If the disk is full; nothing of the shard is committed.
        """
        samples = self.samples_of(bucket_id, shard_id)
        self._check_lengths(samples, hidden_states, "hidden_states")
        columns: dict[str, Sequence[NDArray[Any]]] = {"hidden_states": hidden_states}
        fp8_error = None
        if self.shape.hidden_states_dtype == "fp8":
            for position, states in enumerate(hidden_states):
                if not all_finite(states):
                    raise _refusal(samples, position, states, "hidden_states")
            encoded = [encode_fp8(states) for states in hidden_states]
            fp8_error = measure_error(hidden_states, encoded)
            columns = {"hidden_states": [bits for bits, _ in encoded], "hidden_scales": [s for _, s in encoded]}
        if self.shape.last_hidden_state:
            if last_hidden_states is None:
                raise ValueError("this store keeps the last hidden state, none was given")
            self._check_lengths(samples, last_hidden_states, "last_hidden_state")
            columns["last_hidden_state"] = last_hidden_states
        files = {}
        for spec in TOKEN_ARRAYS:
            path = self.store / spec.file_name(bucket_id, shard_id)
            files[spec.file_name(bucket_id, shard_id)] = (path.stat().st_size, checksum_of_file(path))
        for spec in state_arrays(self.shape):
            files[spec.file_name(bucket_id, shard_id)] = self._write_states(
                spec, bucket_id, shard_id, columns[spec.name]
            )
        record = commit.CommitRecord(
            bucket_id=bucket_id,
            shard_id=shard_id,
            chunk_tokens=self.buckets[bucket_id].chunk_tokens,
            shard_tokens=self.buckets[bucket_id].shard_tokens,
            samples=tuple(
                commit.StoredSample(sample_id=sample_id, start=start, num_tokens=num_tokens)
                for sample_id, start, num_tokens in samples.select("sample_id", "start", "num_tokens").iter_rows()
            ),
            files=files,
            split_forward_ids=tuple(split_forward_ids),
            fp8_error=fp8_error,
        )
        commit.write_record(self.store, record)
        return record

    def clean_uncommitted(self) -> list[str]:
        """Delete temp files and shard files that no commit record names: what a stopped extraction left half done.

        Returns:
            Names of the deleted files, relative to the store, ascending.
        """
        committed = self.committed()
        known = {
            spec.file_name(bucket_id, shard_id)
            for bucket_id, shard_id in committed
            for spec in shard_arrays(self.shape)
        }
        removed = []
        for path in files_below(self.store):
            name = path.relative_to(self.store).as_posix()
            is_shard_file = name.startswith("buckets/") and path.name.startswith("c.")
            if name.endswith(TEMP_SUFFIX) or (is_shard_file and name not in known):
                path.unlink()
                removed.append(name)
        return sorted(removed)

    def finish(self, manifest: StoreManifest) -> StoreManifest:
        """Complete the store: fill in files, bytes and index fingerprint, and write the manifest.

        Args:
            manifest: Everything else filled in.

        Returns:
            The manifest as written, with its checksum.

        Raises:
            StoreError: If a shard of the index was not committed.
        """
        self.clean_uncommitted()
        missing = sorted(set(self.shards()) - self.committed())
        if missing:
            bucket_id, shard_id = missing[0]
            raise StoreError(
                f"{self.store}: {len(missing)} of {len(self._rows)} shards are not written, the first is bucket "
                f"{bucket_id}, shard {shard_id}; run extract again, or with --close to finish over what is there"
            )
        records = [commit.read_record(self.store, *key) for key in self.shards()]
        num_bytes, named = 0, {MANIFEST_NAME, LOCK_NAME}
        errors = []
        for record in records:
            assert record is not None
            num_bytes += sum(size for size, _ in record.files.values())
            named |= {*record.files, commit.record_name(record.bucket_id, record.shard_id)}
            if record.fp8_error is not None:
                errors.append(record.fp8_error)
        files = {
            path.relative_to(self.store).as_posix(): (path.stat().st_size, checksum_of_file(path))
            for path in files_below(self.store)
            if path.relative_to(self.store).as_posix() not in named
        }
        filled: dict[str, Any] = {
            "num_bytes": num_bytes,
            "index_fingerprint": index_fingerprint(self.index),
            "files": dict(sorted(files.items())),
        }
        if errors:
            filled["fp8_error"], filled["fp8_first_token_error"] = relative_errors(errors)
        return write_manifest(self.store, manifest.model_copy(update=filled))

    def free_bytes(self) -> int:
        """Free space on the disk of the store."""
        return shutil.disk_usage(self.store).free

    def _write_states(
        self, spec: ArraySpec, bucket_id: int, shard_id: int, columns: Sequence[NDArray[Any]]
    ) -> tuple[int, str]:
        assert spec.codec is not None
        bucket = self.buckets[bucket_id]
        for values in columns:
            if values.shape[1:] != spec.row_shape or values.dtype != np.dtype(spec.dtype):
                raise ValueError(
                    f"{spec.name}: got {values.dtype} rows of shape {values.shape[1:]}, "
                    f"expected {spec.dtype} rows of shape {spec.row_shape}"
                )
        samples = self.samples_of(bucket_id, shard_id)
        encoder = ShardEncoder(
            columns,
            self._starts(samples, bucket_id, shard_id),
            chunk_tokens=bucket.chunk_tokens,
            shard_tokens=bucket.shard_tokens,
            codec=spec.codec,
        )
        try:
            size = write_file(self.store / spec.file_name(bucket_id, shard_id), encoder)
        except NonFiniteStates as error:
            raise _refusal(samples, error.position, columns[error.position], spec.name) from None
        return size, encoder.checksum()

    def _starts(self, samples: pl.DataFrame, bucket_id: int, shard_id: int) -> list[int]:
        first = shard_id * self.buckets[bucket_id].shard_tokens
        return [start - first for start in samples["start"].to_list()]

    @staticmethod
    def _check_lengths(samples: pl.DataFrame, columns: Sequence[NDArray[Any]], name: str) -> None:
        given = [len(values) for values in columns]
        if given != samples["num_tokens"].to_list():
            raise ValueError(f"{name}: lengths {given} are not those of the index {samples['num_tokens'].to_list()}")


def _refusal(samples: pl.DataFrame, position: int, states: NDArray[np.uint16], name: str) -> StoreError:
    return StoreError(
        f"sample {samples['sample_id'][position]}: {name} holds infinite or NaN values{_hurt_layers(states)}, which a "
        "store never keeps. Run the target in bfloat16 or float32, or drop the sample from the data"
    )


def _hurt_layers(values: NDArray[np.uint16]) -> str:
    if values.ndim < 3:
        return ""
    layers = [str(layer + 1) for layer in range(values.shape[1]) if not all_finite(values[:, layer].copy())]
    return f" in captured layer {', '.join(layers)} of {values.shape[1]}"
