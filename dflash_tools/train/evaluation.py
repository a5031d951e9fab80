"""Held-out evaluation: fixed anchors, pooled by counts, and nothing of the training state touched."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_tools.contracts.record import BucketEvaluation, EvaluationRecord
from dflash_tools.errors import UserError
from dflash_tools.plan.dealing import deal_to_ranks
from dflash_tools.train.batch import BatchReader, BatchRequest
from dflash_tools.train.feed import Feed
from dflash_tools.train.figures import pool
from dflash_tools.train.step import Learner


def evaluate_held_out(
    learner: Learner,
    reader: BatchReader,
    requests: Sequence[BatchRequest],
    *,
    prefetch_bytes: int,
    stop_requested: Callable[[], bool],
) -> Tensor | None:
    """Measure the held-out samples; ranks share the batches.

    Args:
        learner: The drafter.
        reader: Makes the batches.
        requests: The held-out batches, the same on all ranks.
        prefetch_bytes: Bound on batches read ahead.
        stop_requested: Looked at after every batch; a wish on any rank ends the evaluation on all.

    Returns:
        Figures of every batch, on the CPU, shape (num_batches, num_columns); None if it was given up.
    """
    world = learner.world
    costs = [float(r.num_anchors.sum() * reader.drafter.block_size + r.num_tokens.sum()) for r in requests]
    share = [requests[i] for i in deal_to_ranks(costs, world.size)[world.rank]]
    # One more row than batches: a rank that wants to stop marks it, and the sum tells all of them.
    table = learner.make_table(len(requests) + 1)
    feed = Feed(share, reader.read, num_bytes=reader.num_bytes, max_bytes=prefetch_bytes)
    with feed, learner.measured_weights():
        for batch in feed:
            learner.measure(batch, table[batch.request.batch])
            if stop_requested():
                table[-1, 0] = 1.0
                break
    world.sum_in_place(table)
    table = table.cpu()
    return None if table[-1, 0] else table[:-1]


def make_evaluation_record(
    requests: Sequence[BatchRequest], table: Tensor, *, step: int, attempt: int, seconds: float
) -> EvaluationRecord:
    """Pool the figures of an evaluation, over all samples and bucket by bucket.

    Raises:
        UserError: If the held-out loss is not finite.
    """
    total = pool(table)
    if not np.isfinite(total.loss):
        raise UserError(
            f"after step {step} the held-out loss is not finite: the weights have diverged. Start a new run with a "
            "lower optimizer.learning_rate; earlier checkpoints are healthy"
        )
    return EvaluationRecord(
        step=step,
        attempt=attempt,
        num_samples=sum(len(request.rows) for request in requests),
        loss=total.loss,
        accuracy_by_slot=total.accuracy_by_slot,
        count_by_slot=total.count_by_slot,
        acceptance_length=total.acceptance_length,
        num_blocks=total.num_blocks,
        num_truncated_blocks=total.num_truncated_blocks,
        by_bucket=tuple(_bucket(bucket_id, requests, table) for bucket_id in sorted({r.bucket_id for r in requests})),
        seconds=seconds,
        finished_at=time.time(),
    )


def _bucket(bucket_id: int, requests: Sequence[BatchRequest], table: Tensor) -> BucketEvaluation:
    members = [i for i, request in enumerate(requests) if request.bucket_id == bucket_id]
    figures = pool(table[torch.tensor(members)])
    return BucketEvaluation(
        bucket_id=bucket_id,
        num_samples=sum(len(requests[i].rows) for i in members),
        num_blocks=figures.num_blocks,
        loss=figures.loss,
        acceptance_length=figures.acceptance_length,
    )
