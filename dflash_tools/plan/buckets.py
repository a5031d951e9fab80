"""Which lengths make a bucket. Bucket b holds edges[b - 1] < num_tokens <= edges[b]: every edge is inclusive."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Six ranges whose last one, 3,296 .. 8,192 tokens, made 52 % of the batches of a run that kept resetting.
FOUNDING_EDGES = (770, 1216, 1728, 2432, 3296, 8192)


def choose_edges(num_tokens: ArrayLike, count: int) -> NDArray[np.int64]:
    """Choose bucket edges of equal token mass.

    Args:
        num_tokens: Length of every sample. Shape: (num_samples,). Unit: tokens.
        count: Buckets wanted.

    Returns:
        Ascending edges, the last one the longest length. Shape: (count,), or fewer entries if there are fewer
        distinct lengths than ``count``.

    Raises:
        ValueError: If there is no sample, a length below 1, or ``count`` below 1.
    """
    lengths, samples = _distinct_lengths(num_tokens, count)
    count = min(count, len(lengths))
    mass = np.cumsum(lengths * samples)
    edges: list[int] = []
    for bucket_id in range(count - 1):
        # The distinct length whose cumulative mass is nearest to the quantile, leaving one for every other bucket.
        quantile = mass[-1] * (bucket_id + 1) / count
        nearest = int(np.argmin(np.abs(mass - quantile)))
        lowest = edges[-1] + 1 if edges else 0
        edges.append(min(max(nearest, lowest), len(lengths) - count + bucket_id))
    return lengths[[*edges, len(lengths) - 1]]


def choose_edges_optimal(num_tokens: ArrayLike, count: int) -> NDArray[np.int64]:
    """Choose the bucket edges that pad least if every sample is padded to its bucket's edge.

    Args:
        num_tokens: Length of every sample. Shape: (num_samples,). Unit: tokens.
        count: Buckets wanted.

    Returns:
        Ascending edges, the last one the longest length. Shape: (count,), or fewer entries if there are fewer
        distinct lengths than ``count``.

    Raises:
        ValueError: If there is no sample, a length below 1, or ``count`` below 1.
    """
    lengths, samples = _distinct_lengths(num_tokens, count)
    count = min(count, len(lengths))
    # A bucket of the distinct lengths i .. j - 1 pads to edge * (before[j] - before[i]) tokens; its real tokens do not
    # depend on the edges. cheapest[j] covers the first j lengths.
    before = [0, *np.cumsum(samples).tolist()]
    cheapest = [edge * number for edge, number in zip([0, *lengths.tolist()], before, strict=True)]
    cuts: list[list[int]] = []
    for _ in range(count - 1):
        cheapest, cut = _add_bucket(cheapest, before, lengths.tolist())
        cuts.append(cut)
    edges, end = [], len(lengths)
    for cut in reversed(cuts):
        edges.append(end - 1)
        end = cut[end]
    return lengths[[end - 1, *reversed(edges)]]


def _add_bucket(cheapest: list[int], before: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """One round of the dynamic programme: the best start of one more bucket, for every end.

    The cost of ending at j is min over i < j of cheapest[i] - edge_j * before[i], plus a term of j alone: lines with
    falling slopes asked at rising places, so the lower envelope gives all minima in linear time.
    """
    costs, cut = [0] * len(cheapest), [0] * len(cheapest)
    envelope: list[int] = []
    best = 0
    for end in range(1, len(cheapest)):
        line = end - 1
        while len(envelope) - best >= 2 and _is_hidden(envelope[-2], envelope[-1], line, cheapest, before):
            envelope.pop()
        envelope.append(line)
        edge = lengths[end - 1]
        while best + 1 < len(envelope) and (
            cheapest[envelope[best + 1]] - edge * before[envelope[best + 1]]
            <= cheapest[envelope[best]] - edge * before[envelope[best]]
        ):
            best += 1
        start = envelope[best]
        costs[end], cut[end] = cheapest[start] + edge * (before[end] - before[start]), start
    return costs, cut


def _is_hidden(left: int, middle: int, right: int, cheapest: list[int], before: list[int]) -> bool:
    """True if the middle line is nowhere below both others."""
    return (cheapest[right] - cheapest[left]) * (before[middle] - before[left]) <= (
        cheapest[middle] - cheapest[left]
    ) * (before[right] - before[left])


def assign_buckets(num_tokens: ArrayLike, edges: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """Find the bucket of every sample: the smallest edge that is not below its length.

    Args:
        num_tokens: Length of every sample. Shape: (num_samples,). Unit: tokens.
        edges: Longest length of each bucket, ascending. Shape: (num_buckets,). Unit: tokens.

    Returns:
        Bucket ids. Shape: (num_samples,).

    Raises:
        ValueError: If edges do not ascend, or a length is below 1 or above the last edge.
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)
    bounds = np.asarray(edges, dtype=np.int64)
    if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] < 1 or np.any(np.diff(bounds) < 1):
        raise ValueError(f"bucket edges must be positive and ascend, got {bounds.tolist()}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a sample has at least 1 token, got {lengths.min()}")
    if len(lengths) and lengths.max() > bounds[-1]:
        raise ValueError(
            f"{np.count_nonzero(lengths > bounds[-1])} samples are longer than the last edge, {bounds[-1]} tokens; "
            f"the longest has {lengths.max()}"
        )
    # Left-side search: a sample of exactly edges[b] tokens still fits bucket b.
    return np.searchsorted(bounds, lengths, side="left").astype(np.int32)


def _distinct_lengths(num_tokens: ArrayLike, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths, samples = np.unique(np.asarray(num_tokens, dtype=np.int64), return_counts=True)
    if len(lengths) == 0 or lengths[0] < 1:
        raise ValueError("bucket edges need at least one sample, and every sample at least 1 token")
    if count < 1:
        raise ValueError(f"need at least 1 bucket, got {count}")
    return lengths, samples.astype(np.int64)
