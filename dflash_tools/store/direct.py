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
    """One shard of one array, its index in a form that is fast to ask.

    Attributes:
        data: The whole file. Shape: (num_bytes,).
        offsets: First byte of each chunk. One entry per chunk place; a plain chunk is the only one.
        sizes: Bytes of each chunk, CRC included.
        run_ends: One past the last of the chunks that follow chunk i without a gap; i itself if it is not there.
        checked: 1 = the chunk's CRC was right in this process. Outlives the map.
    """

    data: NDArray[np.uint8]
    offsets: list[int]
    sizes: list[int]
    run_ends: list[int]
    checked: bytearray


class DirectReader:
    """Reads rows of any array of a local store.

    Threads may share it. After a fork the child goes on with the parent's maps; a bounded number is kept open.
    """

    def __init__(self, store: Path, buckets: tuple[BucketLayout, ...]) -> None:
        self._store = store
        self._buckets = buckets
        self._open: OrderedDict[FileKey, MappedFile] = OrderedDict()
        self._checked: dict[FileKey, bytearray] = {}
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
        file = self._file(spec, bucket_id, shard_id)
        bucket = self._buckets[bucket_id]
        row = start - shard_id * bucket.shard_tokens
        target = out.reshape(-1).view(np.uint8)
        if spec.codec is None:
            _check(file, 0)
            first_byte = row * spec.row_bytes
            target[:] = file.data[first_byte : first_byte + target.nbytes]
            return
        chunk_bytes = bucket.chunk_tokens * spec.row_bytes
        first = row // bucket.chunk_tokens
        stop = first - (-target.nbytes // chunk_bytes)
        done = 0
        if spec.codec == "none" and file.run_ends[first] >= stop and file.checked.find(0, first, stop) < 0:
            done = _copy_run(file, first, chunk_bytes, target)
        for chunk in range(first + done, stop):
            piece = target[(chunk - first) * chunk_bytes : (chunk - first + 1) * chunk_bytes]
            if file.run_ends[chunk] == chunk:
                raise ReadFault(f"chunk {chunk} was never written")
            if spec.codec == "none":
                _copy_chunk(file, chunk, piece)
            else:
                _decode_chunk(file, chunk, chunk_bytes, piece)

    def _file(self, spec: ArraySpec, bucket_id: int, shard_id: int) -> MappedFile:
        key = (bucket_id, shard_id, spec.name)
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
            index = np.array([[0, data.nbytes]], dtype=np.uint64)
            return _mapped(data, index, self._checked.setdefault(key, bytearray(1)))
        bucket = self._buckets[bucket_id]
        num_chunks = bucket.shard_tokens // bucket.chunk_tokens
        tail = num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES
        decoded = decode_index(data[-tail:]) if data.nbytes >= tail else None
        if decoded is None:
            raise ReadFault(f"the shard index of {name} fails its checksum")
        present = decoded[decoded[:, 0] != MISSING]
        if np.any(present.sum(axis=1) > data.nbytes - tail):
            raise ReadFault(f"the shard index of {name} points beyond the chunks")
        if spec.codec == "none" and np.any(present[:, 1] != bucket.chunk_tokens * spec.row_bytes + CRC_BYTES):
            raise ReadFault(f"a chunk of {name} has another size than the manifest says")
        return _mapped(data, decoded, self._checked.setdefault(key, bytearray(num_chunks)))


def _mapped(data: NDArray[np.uint8], index: NDArray[np.uint64], checked: bytearray) -> MappedFile:
    offsets, sizes = index[:, 0], index[:, 1]
    present = offsets != MISSING
    places = np.arange(len(index))
    breaks = np.ones(len(index), dtype=np.bool_)  # nothing follows this chunk without a gap
    breaks[:-1] = ~present[:-1] | ~present[1:] | (offsets[1:] != offsets[:-1] + sizes[:-1])
    run_ends = np.minimum.accumulate(np.where(breaks, places + 1, len(index) + 1)[::-1])[::-1]
    return MappedFile(data, offsets.tolist(), sizes.tolist(), np.where(present, run_ends, places).tolist(), checked)


def _copy_run(file: MappedFile, first: int, chunk_bytes: int, target: NDArray[np.uint8]) -> int:
    """Copy whole chunks in one strided copy, which skips the sums between them. Returns their number."""
    whole = target.nbytes // chunk_bytes
    source: NDArray[np.uint8] = np.ndarray(
        (whole, chunk_bytes),
        np.uint8,
        file.data,
        offset=file.offsets[first],
        strides=(chunk_bytes + CRC_BYTES, 1),
    )
    np.copyto(target[: whole * chunk_bytes].reshape(whole, chunk_bytes), source)
    return whole


def _copy_chunk(file: MappedFile, chunk: int, piece: NDArray[np.uint8]) -> None:
    stored = file.data[file.offsets[chunk] : file.offsets[chunk] + file.sizes[chunk]]
    if file.checked[chunk]:
        piece[:] = stored[: piece.nbytes]
        return
    # The sum is made over the copy, block by block, while a block is still in the cache.
    crc = 0
    for first in range(0, piece.nbytes, _CHECK_BYTES):
        block = piece[first : first + _CHECK_BYTES]
        block[:] = stored[first : first + block.nbytes]
        crc = extend_crc(crc, block)
    crc = extend_crc(crc, stored[piece.nbytes : -CRC_BYTES])
    _settle(file, chunk, crc.to_bytes(CRC_BYTES, "little") == stored[-CRC_BYTES:].tobytes())


def _decode_chunk(file: MappedFile, chunk: int, chunk_bytes: int, piece: NDArray[np.uint8]) -> None:
    _check(file, chunk)
    payload = file.data[file.offsets[chunk] : file.offsets[chunk] + file.sizes[chunk] - CRC_BYTES]
    if piece.nbytes == chunk_bytes:
        decompress(payload, piece)
        return
    whole = np.empty(chunk_bytes, dtype=np.uint8)
    decompress(payload, whole)
    piece[:] = whole[: piece.nbytes]


def _check(file: MappedFile, chunk: int) -> None:
    if file.checked[chunk]:
        return
    stored = file.data[file.offsets[chunk] : file.offsets[chunk] + file.sizes[chunk]]
    _settle(file, chunk, crc_bytes(stored[:-CRC_BYTES]) == stored[-CRC_BYTES:].tobytes())


def _settle(file: MappedFile, chunk: int, is_whole: bool) -> None:
    if not is_whole:
        raise ReadFault(f"chunk {chunk} fails its checksum")
    file.checked[chunk] = 1


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
