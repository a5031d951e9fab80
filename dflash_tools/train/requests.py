"""Which batches this process reads: its share of the plan, and the held-out samples."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan.dealing import deal_to_ranks
from dflash_tools.train.batch import EVALUATION_EPOCH, BatchRequest
from dflash_tools.train.stores import Samples


def plan_request(plan: BatchPlan, batch: int, samples: Samples, anchors_of_row: NDArray[np.int64]) -> BatchRequest:
    """Ask for one batch of the plan.

    Args:
        plan: The order of the run.
        batch: Position in it.
        samples: The stores.
        anchors_of_row: Blocks of every row. Shape: (num_samples,).
    """
    rows = plan.rows(batch)
    return BatchRequest(
        batch=batch,
        bucket_id=int(plan.bucket_ids[batch]),
        epoch=int(plan.epochs[batch]),
        rows=rows,
        num_anchors=anchors_of_row[rows],
        num_tokens=samples.num_tokens[rows],
    )


def batch_costs(
    plan: BatchPlan, samples: Samples, anchors_of_row: NDArray[np.int64], block_size: int
) -> NDArray[np.float64]:
    """Work of every batch: block slots go through the whole drafter, context tokens only through a projection.

    Returns:
        Slots plus context tokens. Shape: (num_batches,).
    """
    rows = plan.sample_rows
    work = anchors_of_row[rows] * block_size + samples.num_tokens[rows]
    sums = np.concatenate([[0], np.cumsum(work)])
    costs: NDArray[np.float64] = (sums[plan.offsets[1:]] - sums[plan.offsets[:-1]]).astype(np.float64)
    return costs


def share_step(plan: BatchPlan, costs: NDArray[np.float64], step: int, world_size: int) -> list[list[int]]:
    """Share the batches of a step among ranks, by cost.

    Returns:
        Batches of each rank, ascending; none for some if there are fewer batches than ranks.
    """
    batches = plan.batches_of_step(step)
    shares = deal_to_ranks(costs[batches.start : batches.stop], world_size)
    return [[batches.start + int(position) for position in share] for share in shares]


def evaluation_requests(samples: Samples, config: TrainConfig) -> list[BatchRequest]:
    """Ask for the held-out samples, bucket by bucket and by length, within the plan's budgets.

    With ``evaluation.max_samples`` those with the lowest sample ids: the index is sorted by length, ids are hashes. The
    anchors are keyed by seed and sample alone, so every evaluation of every run with this seed sees the same ones.
    """
    rows = _bounded(samples, config.evaluation.max_samples)
    num_anchors = np.minimum(samples.columns.num_valid_anchors, config.evaluation.num_anchors)
    requests: list[BatchRequest] = []
    for bucket_id in np.unique(samples.columns.bucket_ids[rows]):
        members = rows[samples.columns.bucket_ids[rows] == bucket_id]
        members = members[np.argsort(samples.num_tokens[members], kind="stable")]
        for batch_rows in _cut(members, samples.num_tokens, num_anchors, config):
            requests.append(
                BatchRequest(
                    batch=len(requests),
                    bucket_id=int(bucket_id),
                    epoch=EVALUATION_EPOCH,
                    rows=batch_rows,
                    num_anchors=num_anchors[batch_rows],
                    num_tokens=samples.num_tokens[batch_rows],
                )
            )
    return requests


def _bounded(samples: Samples, max_samples: int | None) -> NDArray[np.int64]:
    rows = samples.validation_rows
    lowest_ids = np.argsort(samples.sample_ids[rows], kind="stable")[:max_samples]
    chosen: NDArray[np.int64] = np.sort(rows[lowest_ids])
    return chosen


def _cut(
    rows: NDArray[np.int64], num_tokens: NDArray[np.int64], num_anchors: NDArray[np.int64], config: TrainConfig
) -> Iterator[NDArray[np.int64]]:
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not _fits(rows[start : end + 1], num_tokens, num_anchors, config):
            yield rows[start:end]
            start = end


def _fits(
    rows: Sequence[int] | NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    num_anchors: NDArray[np.int64],
    config: TrainConfig,
) -> bool:
    plan = config.plan
    return (
        len(rows) <= plan.max_batch_size
        and len(rows) * int(num_tokens[rows].max()) <= plan.token_budget
        and (plan.anchor_budget is None or int(num_anchors[rows].sum()) <= plan.anchor_budget)
    )
