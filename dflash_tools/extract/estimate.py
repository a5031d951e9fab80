"""How many bytes a store will take, from its layout alone, and what would fit instead."""

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from dflash_tools.contracts.manifest import BucketLayout
from dflash_tools.errors import StoreError
from dflash_tools.store.arrays import CRC_BYTES, TOKEN_ARRAYS, ArraySpec, StoreShape, shard_arrays, state_arrays
from dflash_tools.store.shard import INDEX_ENTRY_BYTES

# Ratio of the lossless codec; measured on states of SmolLM2 (docs/benchmarks). Other targets differ by a few percent.
LOSSLESS_RATIO = {"bfloat16": 1.41, "fp8": 1.15}
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
SPARE_BYTES = 64 << 20  # commit records, index, target folder


@dataclass(frozen=True, kw_only=True)
class BucketEstimate:
    """One bucket of a store to be."""

    bucket_id: int
    min_tokens: int
    max_tokens: int
    num_samples: int
    num_tokens: int
    num_shards: int
    num_bytes: int


def estimate_buckets(
    num_tokens: NDArray[np.int32], bucket_ids: NDArray[np.int32], buckets: Sequence[BucketLayout], shape: StoreShape
) -> list[BucketEstimate]:
    """Estimate the bytes of each bucket's files: exact for codec none.

    Args:
        num_tokens: Length of each sample. Shape: (num_samples,).
        bucket_ids: Bucket of each sample. Shape: (num_samples,).
        buckets: The layout.
        shape: Width and codec of the states.
    """
    return [
        BucketEstimate(
            bucket_id=bucket.bucket_id,
            min_tokens=bucket.min_tokens,
            max_tokens=bucket.max_tokens,
            num_samples=bucket.num_samples,
            num_tokens=bucket.num_tokens,
            num_shards=bucket.num_shards,
            num_bytes=_bucket_bytes(num_tokens[bucket_ids == bucket.bucket_id], bucket, shape),
        )
        for bucket in buckets
    ]


def count_files(buckets: Sequence[BucketLayout], shape: StoreShape) -> int:
    """Files of all shards, commit records included."""
    return sum(bucket.num_shards for bucket in buckets) * (len(shard_arrays(shape)) + 1)


def free_bytes(folder: Path) -> int:
    """Free space on the disk where a folder is or will be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def what_fits(num_bytes: int, shape: StoreShape, free: int) -> list[str]:
    """Settings that would make the store fit into ``free`` bytes, in words; smallest loss first."""
    per_token = _stored_bytes_per_token(shape)
    choices = {
        'store.codec = "lossless"': replace(shape, codec="lossless"),
        'store.hidden_states_dtype = "fp8"': replace(shape, hidden_states_dtype="fp8"),
        'store.hidden_states_dtype = "fp8" with store.codec = "lossless"': replace(
            shape, hidden_states_dtype="fp8", codec="lossless"
        ),
    }
    fitting = []
    for words, choice in choices.items():
        needed = int(num_bytes * _stored_bytes_per_token(choice) / per_token)
        if choice != shape and needed < num_bytes and needed + SPARE_BYTES <= free:
            fitting.append(f"{words} (about {needed / 1e9:.3g} GB)")
    return fitting


def check_space(store: Path, num_bytes: int, shape: StoreShape) -> None:
    """Refuse to start what will not fit.

    Raises:
        StoreError: With bytes needed and free, and what would fit.
    """
    free = free_bytes(store)
    if num_bytes + SPARE_BYTES <= free:
        return
    fitting = what_fits(num_bytes, shape, free)
    advice = " or ".join(fitting) if fitting else f"--limit with at most {free / num_bytes:.0%} of the samples"
    raise StoreError(
        f"{store}: the states need about {num_bytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; what would fit: "
        f"{advice}; or give a folder on a larger disk"
    )


@contextlib.contextmanager
def full_disk_explained(store: Path, doing: str) -> Iterator[None]:
    """Turn the system's "no space left" into a sentence.

    Raises:
        StoreError: With what was being done and the free space.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors gives the system's words, but not its number.
        if getattr(error, "errno", None) not in FULL_DISK and "No space left" not in str(error):
            raise
        raise StoreError(
            f"{store}: the disk is full while {doing}; {free_bytes(store) / 1e9:.3g} GB are free. Make room and run "
            "the same command again"
        ) from None


def _bucket_bytes(num_tokens: NDArray[np.int32], bucket: BucketLayout, shape: StoreShape) -> int:
    plain = sum(bucket.num_shards * (bucket.shard_tokens * spec.row_bytes + CRC_BYTES) for spec in TOKEN_ARRAYS)
    num_chunks = int(np.sum(-(-num_tokens.astype(np.int64) // bucket.chunk_tokens)))
    return plain + sum(_state_bytes(spec, num_chunks, bucket, shape) for spec in state_arrays(shape))


def _state_bytes(spec: ArraySpec, num_chunks: int, bucket: BucketLayout, shape: StoreShape) -> int:
    index = bucket.num_shards * (bucket.shard_tokens // bucket.chunk_tokens * INDEX_ENTRY_BYTES + CRC_BYTES)
    if spec.codec == "none":
        return num_chunks * (bucket.chunk_tokens * spec.row_bytes + CRC_BYTES) + index
    # The padding of a chunk compresses away.
    ratio = LOSSLESS_RATIO["bfloat16" if spec.dtype == "uint16" else shape.hidden_states_dtype]
    return int(bucket.num_tokens * spec.row_bytes / ratio) + num_chunks * CRC_BYTES + index


def _stored_bytes_per_token(shape: StoreShape) -> float:
    ratio = LOSSLESS_RATIO[shape.hidden_states_dtype] if shape.codec == "lossless" else 1.0
    return shape.bytes_per_token / ratio
