"""What the run log holds of a step: the plan's composition joined with what training gave."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.record import BatchRecord, StepRecord
from dflash_tools.plan.statistics import BatchLengths, batch_lengths
from dflash_tools.train.figures import Figures, pool
from dflash_tools.train.stores import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one step, on the first rank."""

    data_wait_seconds: float
    compute_seconds: float
    checkpoint_seconds: float  # stall by checkpoints since the record before


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave."""

    step: int
    attempt: int
    ranks: tuple[int, ...]  # who computed each batch
    table: Tensor  # figures of each batch, on the CPU; shape (num_batches, num_columns)
    grad_norm: float
    learning_rate: float
    skipped: bool
    timing: Timing


class Composition:
    """Sizes of every batch of a plan, added up once."""

    def __init__(self, plan: BatchPlan, samples: Samples, anchors_of_row: NDArray[np.int64]) -> None:
        self._plan = plan
        self._lengths: BatchLengths = batch_lengths(plan, samples.num_tokens)
        self._num_supervised_tokens = _sum_by_batch(plan, samples.num_supervised_tokens)
        self._num_anchors = _sum_by_batch(plan, anchors_of_row)

    def make_record(self, result: StepResult) -> StepRecord:
        """Join a step's composition with its figures."""
        plan = self._plan
        batches = plan.batches_of_step(result.step)
        total = pool(result.table)
        records = tuple(
            self._batch_record(batch, rank, pool(result.table[i : i + 1]))
            for i, (batch, rank) in enumerate(zip(batches, result.ranks, strict=True))
        )
        num_tokens = sum(record.num_tokens for record in records)
        num_padded_tokens = sum(record.num_padded_tokens for record in records)
        timing = result.timing
        return StepRecord(
            step=result.step,
            attempt=result.attempt,
            epoch=int(plan.epochs[batches.start]),
            loss=total.loss,
            label_weight=total.label_weight,
            accuracy_by_slot=total.accuracy_by_slot,
            count_by_slot=total.count_by_slot,
            acceptance_length=total.acceptance_length,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            skipped=result.skipped,
            batches=records,
            num_tokens=num_tokens,
            num_padded_tokens=num_padded_tokens,
            num_supervised_tokens=sum(record.num_supervised_tokens for record in records),
            num_anchors=sum(record.num_anchors for record in records),
            padding_efficiency=num_tokens / num_padded_tokens,
            tokens_per_second=num_tokens / (timing.data_wait_seconds + timing.compute_seconds),
            data_wait_seconds=timing.data_wait_seconds,
            compute_seconds=timing.compute_seconds,
            checkpoint_seconds=timing.checkpoint_seconds,
            finished_at=time.time(),
        )

    def _batch_record(self, batch: int, rank: int, figures: Figures) -> BatchRecord:
        lengths = self._lengths
        num_samples, num_tokens = int(lengths.num_samples[batch]), int(lengths.num_tokens[batch])
        return BatchRecord(
            batch=batch,
            bucket_id=int(self._plan.bucket_ids[batch]),
            rank=rank,
            batch_size=num_samples,
            min_tokens=int(lengths.min_tokens[batch]),
            mean_tokens=num_tokens / num_samples,
            max_tokens=int(lengths.max_tokens[batch]),
            num_tokens=num_tokens,
            num_padded_tokens=int(lengths.num_padded_tokens[batch]),
            num_supervised_tokens=int(self._num_supervised_tokens[batch]),
            num_anchors=int(self._num_anchors[batch]),
            num_slots=figures.num_slots,
            num_truncated_blocks=figures.num_truncated_blocks,
            label_weight=figures.label_weight,
            loss=figures.loss,
            acceptance_length=figures.acceptance_length,
        )


def _sum_by_batch(plan: BatchPlan, of_row: NDArray[np.int64]) -> NDArray[np.int64]:
    sums = np.concatenate([[0], np.cumsum(of_row[plan.sample_rows])])
    return np.asarray(sums[plan.offsets[1:]] - sums[plan.offsets[:-1]], dtype=np.int64)
