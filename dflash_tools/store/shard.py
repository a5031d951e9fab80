"""Zarr v3 shards by hand: inner chunks, each with its crc32c, then an index of (offset, size) with its own crc32c."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import Codec
from dflash_tools.store.arrays import BLOSC_BLOCK_BYTES, CRC_BYTES
from dflash_tools.store.bf16 import all_finite
from dflash_tools.store.files import Buffer

INDEX_ENTRY_BYTES = 16
MISSING = np.uint64(0xFFFFFFFFFFFFFFFF)  # offset and size of a chunk that was not written


def crc32c(data: Any) -> int:
    """Castagnoli CRC of a contiguous buffer."""
    return int(google_crc32c.value(data))


def extend_crc(crc: int, data: Any) -> int:
    """Continue a CRC over the bytes that follow."""
    return int(google_crc32c.extend(crc, data))


def crc_bytes(data: Any) -> bytes:
    """The CRC as a crc32c codec stores it: 4 bytes, little-endian."""
    return crc32c(data).to_bytes(CRC_BYTES, "little")


def encode_plain(data: NDArray[Any]) -> list[Buffer]:
    """A chunk under ``bytes, crc32c``: little-endian values and their CRC."""
    flat = as_bytes(data)
    return [flat, crc_bytes(flat)]


class NonFiniteStates(Exception):
    """A sample holds infinite or NaN bfloat16 bits; ``position`` is its place among the samples given."""

    def __init__(self, position: int) -> None:
        super().__init__(f"sample {position} holds infinite or NaN values")
        self.position = position


class ShardEncoder:
    """Encodes a shard, whose samples each start on an inner chunk, while it is written: iterate once."""

    def __init__(
        self,
        samples: Sequence[NDArray[Any]],
        starts: Sequence[int],
        *,
        chunk_tokens: int,
        shard_tokens: int,
        codec: Codec,
    ) -> None:
        """Take what the shard will hold.

        Args:
            samples: Rows of each sample. Shape of each: (num_tokens, ...); whole chunks are not copied.
            starts: First row of each sample inside the shard, ascending multiples of chunk_tokens.
            chunk_tokens: Rows of an inner chunk.
            shard_tokens: Rows of the shard.
            codec: Of the inner chunks.
        """
        self._samples = samples
        self._starts = starts
        self._chunk_tokens = chunk_tokens
        self._num_chunks = shard_tokens // chunk_tokens
        self._codec = codec
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Buffer]:
        """Make the buffers of the file; chunks of uint16 are bfloat16 bits, and looked at while they are in the cache.

        Raises:
            NonFiniteStates: At the first infinite or NaN value.
        """
        index = np.full((self._num_chunks, 2), MISSING, dtype="<u8")
        offset = 0
        for position, (sample, start) in enumerate(zip(self._samples, self._starts, strict=True)):
            for first in range(0, len(sample), self._chunk_tokens):
                rows = sample[first : first + self._chunk_tokens]
                if rows.dtype == np.uint16 and not all_finite(rows):
                    raise NonFiniteStates(position)
                payload = _encode_chunk(rows, self._chunk_tokens, self._codec)
                crc = crc_bytes(payload)
                self._digest.update(crc)
                index[(start + first) // self._chunk_tokens] = offset, len(payload) + CRC_BYTES
                offset += len(payload) + CRC_BYTES
                yield payload
                yield crc
        table = as_bytes(index)
        tail = table.tobytes() + crc_bytes(table)
        self._digest.update(tail)
        yield tail

    def checksum(self) -> str:
        """SHA-256 over the CRCs of the chunks, in the order of the file, and the index; known after iteration."""
        return self._digest.hexdigest()


def check_shard(data: NDArray[np.uint8], num_chunks: int) -> tuple[str | None, NDArray[np.bool_]]:
    """Check every byte of a shard against its own CRCs.

    Args:
        data: The whole file.
        num_chunks: Chunk places of the shard.

    Returns:
        What ``ShardEncoder.checksum`` gave when the file was written, if it is whole; None if the index is damaged.
        And the chunk places that are missing or damaged, shape (num_chunks,).
    """
    tail = data[-(num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES) :]
    index = decode_index(tail)
    damaged = np.ones(num_chunks, dtype=np.bool_)
    if index is None:
        return None, damaged
    digest = hashlib.sha256()
    present = np.flatnonzero(index[:, 0] != MISSING)
    for chunk in present[np.argsort(index[present, 0])]:
        offset, num_bytes = (int(value) for value in index[chunk])
        stop = offset + num_bytes - CRC_BYTES
        stored = data[stop : stop + CRC_BYTES].tobytes()
        damaged[chunk] = crc_bytes(data[offset:stop]) != stored
        digest.update(stored)
    digest.update(tail.tobytes())
    return digest.hexdigest(), damaged


def decode_index(tail: NDArray[np.uint8]) -> NDArray[np.uint64] | None:
    """Read the index at the end of a shard.

    Args:
        tail: The last ``num_chunks * 16 + 4`` bytes of the file.

    Returns:
        Offset and size of each chunk, CRC included; shape (num_chunks, 2). None if its CRC fails.
    """
    table = tail[:-CRC_BYTES]
    if crc_bytes(table) != tail[-CRC_BYTES:].tobytes():
        return None
    return np.frombuffer(table.tobytes(), dtype="<u8").reshape(-1, 2)


def as_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    """View an array as flat little-endian bytes; copies only if it must."""
    little = np.ascontiguousarray(data).astype(data.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8)


def _encode_chunk(rows: NDArray[Any], chunk_tokens: int, codec: Codec) -> NDArray[np.uint8]:
    if len(rows) < chunk_tokens:
        padded = np.zeros((chunk_tokens, *rows.shape[1:]), dtype=rows.dtype)
        padded[: len(rows)] = rows
        rows = padded
    flat = as_bytes(rows)
    return flat if codec == "none" else compress(flat, rows.dtype.itemsize)


def compress(data: NDArray[np.uint8], typesize: int) -> NDArray[np.uint8]:
    """Blosc: zstd level 1, byte shuffle, blocks of 1 MiB."""
    blosc = _blosc()
    codec = blosc.Blosc(cname="zstd", clevel=1, shuffle=blosc.SHUFFLE, blocksize=BLOSC_BLOCK_BYTES)
    return np.frombuffer(codec.encode(data.view(f"u{typesize}")), dtype=np.uint8)


def decompress(payload: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decode a Blosc payload into a flat buffer of exactly its size."""
    _blosc().decompress(payload, out)


def _blosc() -> Any:
    from numcodecs import blosc

    # The contextual mode: no global lock and no thread pool, which would deadlock in a forked worker.
    blosc.use_threads = False
    return blosc
