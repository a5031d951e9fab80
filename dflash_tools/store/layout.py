"""Where every sample goes, decided from lengths alone: chunks, shards, forward batches (pure NumPy)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import BucketLayout, Codec

MIB = 1 << 20
MIN_CHUNK_TOKENS = 8
MAX_CHUNK_BYTES: dict[str, int] = {"none": 4 * MIB, "lossless": 2 * MIB}
MAX_CHUNK_PADDING = 0.03  # of the bucket's own tokens; counts for codec none only, padding compresses away
MIN_SHARD_BYTES = 96 * MIB
MAX_SHARD_BYTES = 1024 * MIB
AIMED_NUM_SHARDS = 16_000  # shards grow so that there are about this many, until they are MAX_SHARD_BYTES
SHARDS_PER_GROUP = 16
HARD_CHUNK_BYTES = (1 << 31) - 4096  # Blosc and several readers stop at 2 GiB


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """Place of every sample of a store.

    Attributes:
        buckets: One entry per bucket edge, empty buckets included.
        shard_ids: Shard of each sample inside its bucket. Shape: (num_samples,), int32.
        forward_ids: Forward batch of each sample inside its shard. Shape: (num_samples,), int32.
        starts: First position on the bucket's token axis. Shape: (num_samples,), int64.
        row_order: Samples in the order of the index rows: by bucket, shard, start. Shape: (num_samples,), int64.
    """

    buckets: tuple[BucketLayout, ...]
    shard_ids: NDArray[np.int32]
    forward_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    row_order: NDArray[np.int64]


def build_layout(
    num_tokens: NDArray[np.int32],
    bucket_ids: NDArray[np.int32],
    edges: Sequence[int],
    *,
    bytes_per_token: int,
    codec: Codec,
    forward_token_budget: int,
    seed: int = 0,
    shard_bytes: int | None = None,
) -> Layout:
    """Fix chunk, shard, position and forward batch of every sample.

    Samples of a bucket are drawn at random into groups of about 16 shards, sorted by length inside a group and cut
    into shards: forward batches have almost no padding, and any set of shards is a fair sample of the bucket.

    Args:
        num_tokens: Length of each sample. Unit: tokens. Shape: (num_samples,).
        bucket_ids: Bucket of each sample. Shape: (num_samples,).
        edges: Longest length of each bucket, ascending, inclusive. Unit: tokens.
        bytes_per_token: Bytes of the cached states of one token before compression.
        codec: "none" or "lossless".
        forward_token_budget: Padded tokens per forward batch; a longer sample makes a batch alone.
        seed: Which samples share a shard.
        shard_bytes: Size of a shard; default by the size of the store.

    Raises:
        ValueError: If a sample does not lie in its bucket, or a chunk would pass 2 GiB.
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)
    buckets_of = np.asarray(bucket_ids, dtype=np.int64)
    _check_buckets(lengths, buckets_of, edges)
    if MIN_CHUNK_TOKENS * bytes_per_token > HARD_CHUNK_BYTES:
        raise ValueError(f"{MIN_CHUNK_TOKENS} tokens of {bytes_per_token} bytes pass 2 GiB, the most a chunk can hold")
    if shard_bytes is None:
        shard_bytes = choose_shard_bytes(int(lengths.sum()) * bytes_per_token)
    generator = np.random.default_rng(seed)
    shard_ids = np.zeros(len(lengths), dtype=np.int32)
    forward_ids = np.zeros(len(lengths), dtype=np.int32)
    starts = np.zeros(len(lengths), dtype=np.int64)
    layouts = []
    for bucket_id, max_tokens in enumerate(edges):
        samples = np.flatnonzero(buckets_of == bucket_id)
        chunk_tokens = choose_chunk_tokens(lengths[samples], bytes_per_token, codec)
        aligned = _round_up(lengths[samples], chunk_tokens)
        wanted = max(shard_bytes // bytes_per_token, forward_token_budget, int(aligned.max(initial=1)))
        # A bucket smaller than a shard gets a shard of its own size.
        shard_tokens = int(_round_up(min(wanted, max(int(aligned.sum()), 1)), chunk_tokens))
        order, shard_of = _fill_shards(lengths[samples], aligned, shard_tokens, generator)
        num_shards = int(shard_of[-1]) + 1 if len(order) else 0
        ordered = samples[order]
        shard_ids[ordered] = shard_of
        starts[ordered] = _starts(aligned[order], shard_of, shard_tokens)
        forward_ids[ordered] = _forward_ids(lengths[ordered], shard_of, forward_token_budget)
        layouts.append(
            BucketLayout(
                bucket_id=bucket_id,
                min_tokens=edges[bucket_id - 1] + 1 if bucket_id else 1,
                max_tokens=max_tokens,
                num_samples=len(samples),
                num_tokens=int(lengths[samples].sum()),
                axis_tokens=num_shards * shard_tokens,
                chunk_tokens=chunk_tokens,
                shard_tokens=shard_tokens,
                num_shards=num_shards,
            )
        )
    row_order = np.lexsort((starts, buckets_of)).astype(np.int64)
    return Layout(
        buckets=tuple(layouts), shard_ids=shard_ids, forward_ids=forward_ids, starts=starts, row_order=row_order
    )


def choose_shard_bytes(total_bytes: int) -> int:
    """Size of a shard: small stores get shards of 96 MiB, large ones up to 1 GiB."""
    return min(max(MIN_SHARD_BYTES, total_bytes // AIMED_NUM_SHARDS), MAX_SHARD_BYTES)


def choose_chunk_tokens(num_tokens: NDArray[np.int64], bytes_per_token: int, codec: Codec) -> int:
    """Rows of an inner chunk: the largest power of two within the limits of the codec.

    Args:
        num_tokens: Lengths of the bucket's own samples. Unit: tokens. Shape: (num_samples,).
        bytes_per_token: Bytes of one row.
        codec: "none" bounds bytes and padding, "lossless" bytes alone.
    """
    chunk_tokens = MIN_CHUNK_TOKENS
    total = int(num_tokens.sum())
    longest = int(num_tokens.max(initial=0))
    while chunk_tokens < longest and 2 * chunk_tokens * bytes_per_token <= MAX_CHUNK_BYTES[codec]:
        padding = int(_round_up(num_tokens, 2 * chunk_tokens).sum()) - total
        if codec == "none" and padding > MAX_CHUNK_PADDING * total:
            break
        chunk_tokens *= 2
    return chunk_tokens


def shard_write_order(
    bucket_ids: NDArray[np.int32], shard_ids: NDArray[np.int32], num_tokens: NDArray[np.int32], *, seed: int = 0
) -> list[tuple[int, int]]:
    """Order in which shards are written: shuffled, but the one with the longest sample first.

    So what is there when a disk fills up is a fair sample, and running out of memory shows in the first minute.

    Args:
        bucket_ids: Bucket of each sample. Shape: (num_samples,).
        shard_ids: Shard of each sample inside its bucket. Shape: (num_samples,).
        num_tokens: Length of each sample. Unit: tokens. Shape: (num_samples,).
        seed: Of the shuffle.

    Returns:
        (bucket_id, shard_id), each shard once.
    """
    if not len(num_tokens):
        return []
    keys = np.unique(np.stack([bucket_ids, shard_ids], axis=1), axis=0)
    shuffled = keys[np.random.default_rng(seed).permutation(len(keys))]
    longest = int(np.argmax(num_tokens))
    first = (int(bucket_ids[longest]), int(shard_ids[longest]))
    rest = [(int(bucket), int(shard)) for bucket, shard in shuffled]
    return [first, *(key for key in rest if key != first)]


def _check_buckets(lengths: NDArray[np.int64], bucket_ids: NDArray[np.int64], edges: Sequence[int]) -> None:
    if len(lengths) != len(bucket_ids):
        raise ValueError(f"{len(lengths)} lengths but {len(bucket_ids)} bucket ids")
    upper = np.asarray(edges, dtype=np.int64)
    if len(upper) == 0 or upper[0] < 1 or np.any(np.diff(upper) < 1):
        raise ValueError(f"edges must be positive and ascending, got {list(edges)}")
    if len(lengths) == 0:
        return
    if bucket_ids.min() < 0 or bucket_ids.max() >= len(upper):
        raise ValueError(f"bucket ids must lie in 0..{len(upper) - 1}")
    lower = np.concatenate([[0], upper[:-1]])
    wrong = np.flatnonzero((lengths <= lower[bucket_ids]) | (lengths > upper[bucket_ids]))
    if len(wrong):
        sample = int(wrong[0])
        bucket = int(bucket_ids[sample])
        raise ValueError(
            f"sample {sample} has {lengths[sample]} tokens, "
            f"its bucket {bucket} holds {lower[bucket] + 1} to {upper[bucket]}"
        )


def _round_up(values: NDArray[np.int64] | int, multiple: int) -> NDArray[np.int64]:
    return np.asarray(-(-np.asarray(values, dtype=np.int64) // multiple) * multiple, dtype=np.int64)


def _fill_shards(
    lengths: NDArray[np.int64], aligned: NDArray[np.int64], shard_tokens: int, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw samples into groups, sort each group by length and cut it into shards.

    Returns:
        Samples in shard order, and the shard of each. Shapes: (num_samples,).
    """
    drawn = generator.permutation(len(aligned))
    ends = np.cumsum(aligned[drawn])
    group_of = (ends - 1) // (SHARDS_PER_GROUP * shard_tokens)
    # Stable: equal lengths keep the drawn order.
    order = drawn[np.lexsort((lengths[drawn], group_of))]
    groups = np.sort(group_of)
    ends = np.cumsum(aligned[order])
    shard_of = np.zeros(len(order), dtype=np.int64)
    first, shard_id = 0, 0
    while first < len(order):
        limit = (ends[first - 1] if first else 0) + shard_tokens
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(stop, int(np.searchsorted(groups, groups[first], side="right")))
        shard_of[first:stop] = shard_id
        first, shard_id = stop, shard_id + 1
    return order, shard_of


def _starts(aligned: NDArray[np.int64], shard_of: NDArray[np.int64], shard_tokens: int) -> NDArray[np.int64]:
    before = np.cumsum(aligned) - aligned
    firsts = np.flatnonzero(np.diff(shard_of, prepend=-1))
    return np.asarray(shard_of * shard_tokens + before - before[firsts][shard_of], dtype=np.int64)


def _forward_ids(lengths: NDArray[np.int64], shard_of: NDArray[np.int64], token_budget: int) -> NDArray[np.int32]:
    """Cut each shard, ascending by length, into batches of rows x longest row <= token_budget."""
    ids = np.zeros(len(lengths), dtype=np.int32)
    shard, forward, rows = -1, 0, 0
    for position, (length, owner) in enumerate(zip(lengths.tolist(), shard_of.tolist(), strict=True)):
        if owner != shard:
            shard, forward, rows = owner, 0, 1
        elif (rows + 1) * length > token_budget:
            forward, rows = forward + 1, 1
        else:
            rows += 1
        ids[position] = forward
    return ids
