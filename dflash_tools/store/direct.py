"""Reading a local store: each shard is mapped once, its index parsed once, each chunk's CRC checked once."""

import mmap
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import BucketLayout
from dflash_tools.store import commit
from dflash_tools.store.arrays import CRC_BYTES, ArraySpec
from dflash_tools.store.shard import INDEX_ENTRY_BYTES, MISSING, crc_bytes, decode_index, decompress, extend_crc

MAX_OPEN_FILES = 256
_CHECK_BYTES = 256 << 10

FileKey = tuple[int, int, str]


class ReadFault(Exception):
    """What is wrong with a shard, in words; ``Store`` adds where and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """One shard of one array.

    Attributes:
        data: The whole file. Shape: (num_bytes,).
        index: Offset and size of each inner chunk, shape (num_chunks, 2); one row for a plain chunk.
    """

    data: NDArray[np.uint8]
    index: NDArray[np.uint64]


class DirectReader:
    """Reads rows of any array of a local store.

    Threads may share it. After a fork the child goes on with the parent's maps; a bounded number is kept open.
    """

    def __init__(self, store: Path, buckets: tuple[BucketLayout, ...]) -> None:
        self._store = store
        self._buckets = buckets
        self._open: OrderedDict[FileKey, MappedFile] = OrderedDict()
        self._checked: dict[FileKey, NDArray[np.bool_]] = {}  # outlives the maps: once per chunk and process
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def read(self, spec: ArraySpec, bucket_id: int, shard_id: int, start: int, out: NDArray[Any]) -> None:
        """Copy rows into a buffer.

        Args:
            spec: The array.
            bucket_id: Bucket of the sample.
            shard_id: Shard that holds all rows.
            start: First row on the bucket's token axis, on a chunk boundary.
            out: C-contiguous, of the array's dtype. Shape: (num_tokens, *row_shape).

        Raises:
            ReadFault: If a file or chunk is missing, of another size, or fails its checksum.
        """
        key = (bucket_id, shard_id, spec.name)
        file = self._file(key, spec)
        bucket = self._buckets[bucket_id]
        row = start - shard_id * bucket.shard_tokens
        target = out.reshape(-1).view(np.uint8)
        if spec.codec is None:
            self._check(key, file, 0)
            first = row * spec.row_bytes
            target[:] = file.data[first : first + target.nbytes]
            return
        chunk_bytes = bucket.chunk_tokens * spec.row_bytes
        first_chunk = row // bucket.chunk_tokens
        stop_chunk = first_chunk - (-target.nbytes // chunk_bytes)
        if spec.codec == "none":
            self._copy_run(key, file, range(first_chunk, stop_chunk), chunk_bytes, target)
        else:
            self._decode_run(key, file, range(first_chunk, stop_chunk), chunk_bytes, target)

    def _copy_run(
        self, key: FileKey, file: MappedFile, chunks: range, chunk_bytes: int, target: NDArray[np.uint8]
    ) -> None:
        stride = chunk_bytes + CRC_BYTES
        offsets = self._offsets(file, chunks)
        if np.any(file.index[chunks.start : chunks.stop, 1] != stride):
            raise ReadFault(f"a chunk of {key[2]} is not {stride} bytes")
        whole = target.nbytes // chunk_bytes
        adjacent = bool(np.all(np.diff(offsets) == stride))
        if adjacent and self._checked[key][chunks.start : chunks.stop].all():
            # One strided copy skips the checksums between the chunks.
            source: NDArray[np.uint8] = np.ndarray(
                (whole, chunk_bytes), np.uint8, file.data, offset=int(offsets[0]), strides=(stride, 1)
            )
            np.copyto(target[: whole * chunk_bytes].reshape(whole, chunk_bytes), source)
            done = whole
        else:
            done = 0
        for position in range(done, len(chunks)):
            offset = int(offsets[position])
            piece = target[position * chunk_bytes : (position + 1) * chunk_bytes]
            self._copy_chunk(key, chunks[position], file.data[offset : offset + stride], piece)

    def _copy_chunk(self, key: FileKey, chunk: int, stored: NDArray[np.uint8], piece: NDArray[np.uint8]) -> None:
        if self._checked[key][chunk]:
            piece[:] = stored[: piece.nbytes]
            return
        # The sum is made over the copy, block by block, while a block is still in the cache.
        crc = 0
        for first in range(0, piece.nbytes, _CHECK_BYTES):
            block = piece[first : first + _CHECK_BYTES]
            block[:] = stored[first : first + block.nbytes]
            crc = extend_crc(crc, block)
        crc = extend_crc(crc, stored[piece.nbytes : -CRC_BYTES])
        self._settle(key, chunk, crc.to_bytes(CRC_BYTES, "little") == stored[-CRC_BYTES:].tobytes())

    def _settle(self, key: FileKey, chunk: int, is_whole: bool) -> None:
        if not is_whole:
            raise ReadFault(f"chunk {chunk} of {key[2]} fails its checksum")
        self._checked[key][chunk] = True

    def _decode_run(
        self, key: FileKey, file: MappedFile, chunks: range, chunk_bytes: int, target: NDArray[np.uint8]
    ) -> None:
        offsets = self._offsets(file, chunks)
        for position, chunk in enumerate(chunks):
            self._check(key, file, chunk)
            stop = int(offsets[position]) + int(file.index[chunk, 1]) - CRC_BYTES
            payload = file.data[int(offsets[position]) : stop]
            piece = target[position * chunk_bytes : (position + 1) * chunk_bytes]
            if piece.nbytes == chunk_bytes:
                decompress(payload, piece)
            else:
                whole = np.empty(chunk_bytes, dtype=np.uint8)
                decompress(payload, whole)
                piece[:] = whole[: piece.nbytes]

    def _offsets(self, file: MappedFile, chunks: range) -> NDArray[np.int64]:
        entries = file.index[chunks.start : chunks.stop]
        if np.any(entries == MISSING):
            raise ReadFault(f"chunk {chunks.start + int(np.argmax(entries[:, 0] == MISSING))} was never written")
        if np.any(entries.sum(axis=1) > file.data.nbytes):
            raise ReadFault("the shard index points beyond the end of the file")
        return entries[:, 0].astype(np.int64)

    def _check(self, key: FileKey, file: MappedFile, chunk: int) -> None:
        checked = self._checked[key]
        if checked[chunk]:
            return
        offset, num_bytes = (int(value) for value in file.index[chunk])
        stop = offset + num_bytes - CRC_BYTES
        self._settle(key, chunk, crc_bytes(file.data[offset:stop]) == file.data[stop : stop + CRC_BYTES].tobytes())

    def _file(self, key: FileKey, spec: ArraySpec) -> MappedFile:
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the fork.
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            file = self._open.get(key)
            if file is not None:
                self._open.move_to_end(key)
                return file
        file = self._map(key, spec)
        with self._lock:
            self._checked.setdefault(key, np.zeros(len(file.index), dtype=np.bool_))
            file = self._open.setdefault(key, file)
            while len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return file

    def _map(self, key: FileKey, spec: ArraySpec) -> MappedFile:
        bucket_id, shard_id, _ = key
        name = spec.file_name(bucket_id, shard_id)
        if name not in self._sizes:
            record = commit.read_record(self._store, bucket_id, shard_id)
            if record is None:
                raise ReadFault(f"commit record {commit.record_name(bucket_id, shard_id)} is missing")
            self._sizes.update({file: size for file, (size, _) in record.files.items()})
        data = map_file(self._store / name, self._sizes[name])
        if spec.codec is None:
            return MappedFile(data, np.array([[0, data.nbytes]], dtype=np.uint64))
        bucket = self._buckets[bucket_id]
        tail = bucket.shard_tokens // bucket.chunk_tokens * INDEX_ENTRY_BYTES + CRC_BYTES
        index = decode_index(data[-tail:]) if data.nbytes >= tail else None
        if index is None:
            raise ReadFault(f"the shard index of {name} fails its checksum")
        return MappedFile(data, index)


def map_file(path: Path, expected_bytes: int) -> NDArray[np.uint8]:
    """Map a file read-only after checking its size.

    Raises:
        ReadFault: If it is missing or of another size.
    """
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected_bytes:
                raise ReadFault(f"file {path.name} of {path.parent.name} has {num_bytes} bytes, not {expected_bytes}")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except FileNotFoundError:
        raise ReadFault(f"file {path.name} of {path.parent.name} is missing") from None
