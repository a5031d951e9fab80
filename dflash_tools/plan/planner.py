"""From lengths and settings to the batches of a whole run."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_tools.config import PlanSettings
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.errors import ConfigError
from dflash_tools.plan.balance import balance_steps
from dflash_tools.plan.grouping import Groups, Limits, group_buckets
from dflash_tools.plan.mixing import choose_samples, passes_per_epoch, samples_before
from dflash_tools.plan.ordering import order_buckets
from dflash_tools.plan.packing import pack_samples
from dflash_tools.plan.streams import Purpose, random_words


def build_plan(
    num_tokens: ArrayLike,
    bucket_ids: ArrayLike,
    settings: PlanSettings,
    num_anchors: ArrayLike | None = None,
    *,
    rows: ArrayLike | None = None,
    store_ids: ArrayLike | None = None,
    store_fingerprint: str = "",
) -> BatchPlan:
    """Decide every batch of a run.

    The result depends on the arguments alone: not on world size, rank, machine, or any global generator. An epoch does
    not depend on how many follow. Without samples the plan is empty.

    Args:
        num_tokens: Length of every training sample. Shape: (num_samples,). Unit: tokens.
        bucket_ids: Bucket of every training sample. Shape: (num_samples,).
        settings: The [plan] table.
        num_anchors: Blocks of every training sample (``anchors.anchors_per_sample``). Shape: (num_samples,). Needed
            for ``anchor_budget``; without it padded tokens stand for cost.
        rows: Index row of every training sample, by default 0, 1, 2 ... Shape: (num_samples,).
        store_ids: Store of every training sample, for ``store_weights``; by default all are of store 0.
        store_fingerprint: Identity of the store that the rows point into.

    Raises:
        ConfigError: If a sample is beyond a budget and ``too_long`` is "error", or ``store_weights`` do not fit the
            stores.
        ValueError: If the arrays do not fit each other, or ``anchor_budget`` comes without ``num_anchors``.
    """
    samples = _check_samples(num_tokens, bucket_ids, num_anchors, rows, store_ids, settings)
    if len(samples.rows) == 0:
        return _empty_plan(settings, store_fingerprint)
    _check_budgets(samples, settings)
    passes = None
    if settings.store_weights is not None:
        passes = passes_per_epoch(samples.store_ids, settings.store_weights)
    epochs = []
    num_steps = 0
    for epoch in range(settings.num_epochs):
        chosen = np.arange(len(samples.rows), dtype=np.int64)
        if passes is not None:
            chosen = choose_samples(samples.store_ids, passes, seed=settings.seed, epoch=epoch)
        part = _plan_epoch(samples, chosen, settings, epoch, num_steps)
        epochs.append(part)
        num_steps = int(part.steps[-1]) + 1
        if settings.max_steps is not None and num_steps >= settings.max_steps:
            break
    return _join(epochs, samples, passes, settings, store_fingerprint)


class _Samples(NamedTuple):
    num_tokens: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    num_anchors: NDArray[np.int64] | None
    rows: NDArray[np.int64]
    store_ids: NDArray[np.int32]

    def take(self, positions: NDArray[np.int64]) -> "_Samples":
        return _Samples(
            self.num_tokens[positions],
            self.bucket_ids[positions],
            None if self.num_anchors is None else self.num_anchors[positions],
            self.rows[positions],
            self.store_ids[positions],
        )


class _Epoch(NamedTuple):
    epoch: int
    steps: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    batch_sizes: NDArray[np.int64]
    positions: NDArray[np.int64]  # in the arrays given to the planner


def _check_samples(
    num_tokens: ArrayLike,
    bucket_ids: ArrayLike,
    num_anchors: ArrayLike | None,
    rows: ArrayLike | None,
    store_ids: ArrayLike | None,
    settings: PlanSettings,
) -> _Samples:
    lengths = np.asarray(num_tokens, dtype=np.int64)
    samples = _Samples(
        lengths,
        np.asarray(bucket_ids, dtype=np.int32),
        None if num_anchors is None else np.asarray(num_anchors, dtype=np.int64),
        np.arange(len(lengths), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64),
        np.zeros(len(lengths), dtype=np.int32) if store_ids is None else np.asarray(store_ids, dtype=np.int32),
    )
    shapes = {name: column.shape for name, column in samples._asdict().items() if column is not None}
    if lengths.ndim != 1 or len(set(shapes.values())) != 1:
        raise ValueError(f"need flat arrays with one entry per sample, got shapes {shapes}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a sample has at least 1 token, got {lengths.min()}")
    if samples.num_anchors is None and settings.anchor_budget is not None:
        raise ValueError("anchor_budget needs num_anchors, the blocks of every sample")
    return samples


def _check_budgets(samples: _Samples, settings: PlanSettings) -> None:
    """Refuse samples that fit no batch, unless they may go alone."""
    if settings.too_long == "alone":
        return
    _check_budget(samples.num_tokens, settings.token_budget, "token_budget", "tokens")
    if samples.num_anchors is not None and settings.anchor_budget is not None:
        _check_budget(samples.num_anchors, settings.anchor_budget, "anchor_budget", "anchors")


def _check_budget(sizes: NDArray[np.int64], budget: int, setting: str, unit: str) -> None:
    largest = int(sizes.max())
    if largest > budget:
        raise ConfigError(
            f"{np.count_nonzero(sizes > budget)} of {len(sizes)} samples are beyond plan.{setting} = {budget}; "
            f"the largest has {largest} {unit}. Set plan.{setting} to {largest} or more, "
            f'or plan.too_long = "alone" to give each of them a batch of its own'
        )


def _plan_epoch(
    all_samples: _Samples, chosen: NDArray[np.int64], settings: PlanSettings, epoch: int, first_step: int
) -> _Epoch:
    samples = all_samples.take(chosen)
    groups = _group(samples, settings, epoch)
    order = _order_batches(groups, samples, settings, epoch)
    sizes = np.diff(groups.offsets)[order]
    # Position of every sample: start of its batch plus its place inside it.
    ends = np.cumsum(sizes)
    within = np.arange(len(groups.samples), dtype=np.int64) - np.repeat(ends - sizes, sizes)
    return _Epoch(
        epoch,
        first_step + np.arange(len(order), dtype=np.int64) // settings.batches_per_step,
        groups.bucket_ids[order],
        sizes,
        chosen[groups.samples[np.repeat(groups.offsets[order], sizes) + within]],
    )


def _group(samples: _Samples, settings: PlanSettings, epoch: int) -> Groups:
    anchors = samples.num_anchors
    if anchors is None or settings.anchor_budget is None:
        anchors = np.zeros_like(samples.num_tokens)
    limits = Limits(
        token_budget=settings.token_budget,
        anchor_budget=settings.anchor_budget,
        max_batch_size=settings.max_batch_size,
        sort_window=settings.sort_window,
    )
    if settings.strategy == "packed":
        return pack_samples(samples.num_tokens, anchors, limits, seed=settings.seed, epoch=epoch)
    return group_buckets(samples.num_tokens, anchors, samples.bucket_ids, limits, seed=settings.seed, epoch=epoch)


def _order_batches(groups: Groups, samples: _Samples, settings: PlanSettings, epoch: int) -> NDArray[np.int64]:
    """Order the batches: the strategy orders buckets, chance says which batch of a bucket takes which of its places."""
    words = random_words(len(groups.bucket_ids), seed=settings.seed, epoch=epoch, purpose=Purpose.BATCHES)
    if settings.strategy == "packed":
        return np.argsort(words, kind="stable")
    _, counts = np.unique(groups.bucket_ids, return_counts=True)
    places = order_buckets(counts, settings.strategy, seed=settings.seed, epoch=epoch)
    order = np.empty(len(places), dtype=np.int64)
    order[np.argsort(places, kind="stable")] = np.lexsort((words, groups.bucket_ids))
    if settings.strategy == "interleave":
        costs = _batch_costs(groups, samples)
        order = balance_steps(order, places, costs, settings.batches_per_step)
    return order


def _batch_costs(groups: Groups, samples: _Samples) -> NDArray[np.int64]:
    """Cost of every batch: its blocks, or its padded tokens if blocks are unknown."""
    starts = groups.offsets[:-1]
    if samples.num_anchors is not None:
        return np.add.reduceat(samples.num_anchors[groups.samples], starts)
    return np.diff(groups.offsets) * samples.num_tokens[groups.samples[starts]]


def _join(
    epochs: list[_Epoch],
    samples: _Samples,
    passes: NDArray[np.float64] | None,
    settings: PlanSettings,
    store_fingerprint: str,
) -> BatchPlan:
    steps = np.concatenate([part.steps for part in epochs])
    num_batches = len(steps) if settings.max_steps is None else int(np.searchsorted(steps, settings.max_steps))
    sizes = np.concatenate([part.batch_sizes for part in epochs])[:num_batches]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    positions = np.concatenate([part.positions for part in epochs])[: offsets[-1]]
    epoch_ids = np.repeat([part.epoch for part in epochs], [len(part.steps) for part in epochs])
    return BatchPlan(
        epochs=epoch_ids[:num_batches].astype(np.int32),
        steps=steps[:num_batches],
        bucket_ids=np.concatenate([part.bucket_ids for part in epochs])[:num_batches],
        offsets=offsets,
        sample_rows=samples.rows[positions],
        settings=settings.model_dump(mode="json"),
        store_fingerprint=store_fingerprint,
        left_out=_count_left_out(positions, samples, passes, settings.num_epochs),
    )


def _empty_plan(settings: PlanSettings, store_fingerprint: str) -> BatchPlan:
    return BatchPlan(
        epochs=np.zeros(0, dtype=np.int32),
        steps=np.zeros(0, dtype=np.int64),
        bucket_ids=np.zeros(0, dtype=np.int32),
        offsets=np.zeros(1, dtype=np.int64),
        sample_rows=np.zeros(0, dtype=np.int64),
        settings=settings.model_dump(mode="json"),
        store_fingerprint=store_fingerprint,
    )


def _count_left_out(
    positions: NDArray[np.int64], samples: _Samples, passes: NDArray[np.float64] | None, num_epochs: int
) -> dict[str, int]:
    """Count the samples that no batch holds: those the weights never reach, and those max_steps cuts off."""
    unused = np.ones(len(samples.rows), dtype=np.bool_)
    unused[positions] = False
    by_weights = 0
    if passes is not None:
        sizes = np.bincount(samples.store_ids).tolist()
        reached = [samples_before(size, part, num_epochs) for size, part in zip(sizes, passes.tolist(), strict=True)]
        by_weights = sum(max(0, size - number) for size, number in zip(sizes, reached, strict=True))
    left_out = {"store_weights": by_weights, "max_steps": int(np.count_nonzero(unused)) - by_weights}
    return {reason: number for reason, number in left_out.items() if number}
