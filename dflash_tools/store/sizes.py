"""How many bytes and files a store will take, from its layout alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import BucketLayout, Codec, HiddenStatesDtype
from dflash_tools.store.arrays import CRC_BYTES, TOKEN_ARRAYS, StoreShape, shard_arrays, state_arrays
from dflash_tools.store.shard import INDEX_ENTRY_BYTES

LOSSLESS_RATIO = 1.40  # measured on real bfloat16 states; see docs/benchmarks
LOSSLESS_FP8_RATIO = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """Bytes and files of a store's shards.

    Attributes:
        bytes_by_bucket: Unit: bytes. One entry per bucket.
        num_bytes: Of all shard files; what ``StoreManifest.num_bytes`` will be.
        num_files: Shard files, commit records and array metadata.
    """

    bytes_by_bucket: tuple[int, ...]
    num_bytes: int
    num_files: int


def estimate_size(
    num_tokens: NDArray[np.int32], bucket_ids: NDArray[np.int32], buckets: Sequence[BucketLayout], shape: StoreShape
) -> SizeEstimate:
    """Compute the size of a store before a model is touched; exact for codec none.

    A shard of states takes ``chunks x (chunk_tokens x row_bytes + 4)`` bytes and an index of 16 bytes a chunk place;
    token ids and mask take ``shard_tokens x 5 + 8`` bytes.

    Args:
        num_tokens: Length of each sample. Unit: tokens. Shape: (num_samples,).
        bucket_ids: Bucket of each sample. Shape: (num_samples,).
        buckets: From the layout.
        shape: The arrays.
    """
    by_bucket = []
    num_shards = 0
    for bucket in buckets:
        lengths = np.asarray(num_tokens, dtype=np.int64)[np.asarray(bucket_ids) == bucket.bucket_id]
        num_chunks = int((-(-lengths // bucket.chunk_tokens)).sum())
        token_bytes = sum(bucket.shard_tokens * spec.row_bytes + CRC_BYTES for spec in TOKEN_ARRAYS)
        places = bucket.shard_tokens // bucket.chunk_tokens
        states = 0
        for spec in state_arrays(shape):
            states += num_chunks * CRC_BYTES + bucket.num_shards * (places * INDEX_ENTRY_BYTES + CRC_BYTES)
            if shape.codec == "none":
                states += num_chunks * bucket.chunk_tokens * spec.row_bytes
            else:  # padding compresses away
                states += round(int(lengths.sum()) * spec.row_bytes / _ratio(spec.dtype))
        by_bucket.append(states + bucket.num_shards * token_bytes)
        num_shards += bucket.num_shards
    num_arrays = len(shard_arrays(shape))
    return SizeEstimate(
        bytes_by_bucket=tuple(by_bucket),
        num_bytes=sum(by_bucket),
        num_files=num_shards * (num_arrays + 1) + len(buckets) * (num_arrays + 1) + 2,
    )


def bytes_per_token(
    num_layers: int, hidden_size: int, hidden_states_dtype: HiddenStatesDtype, codec: Codec, last_hidden_state: bool
) -> float:
    """Bytes of the states of one token on disk, padding apart: what another dtype or codec would take."""
    shape = StoreShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        hidden_states_dtype=hidden_states_dtype,
        codec=codec,
        last_hidden_state=last_hidden_state,
    )
    return sum(spec.row_bytes / (_ratio(spec.dtype) if codec == "lossless" else 1.0) for spec in state_arrays(shape))


def _ratio(dtype: str) -> float:
    return LOSSLESS_FP8_RATIO if dtype == "uint8" else LOSSLESS_RATIO
