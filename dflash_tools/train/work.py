"""What a run trains on: the plan joined with the stores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.errors import UserError
from dflash_tools.train.batch import BatchReader, BatchRequest
from dflash_tools.train.records import Composition
from dflash_tools.train.requests import plan_request, share_step
from dflash_tools.train.step import Learner


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """What a run trains on.

    Attributes:
        config: All settings.
        plan: Every batch of the run.
        reader: Makes batches from the stores.
        anchors_of_row: Blocks of every sample row in every epoch. Shape: (num_samples,).
        costs: Work of every batch of the plan. Shape: (num_batches,).
        composition: Sizes of every batch of the plan.
        held_out: The evaluation's batches; none if nothing is held out.
    """

    config: TrainConfig
    plan: BatchPlan
    reader: BatchReader
    anchors_of_row: NDArray[np.int64]
    costs: NDArray[np.float64]
    composition: Composition
    held_out: Sequence[BatchRequest]

    def request(self, batch: int) -> BatchRequest:
        """Ask for one batch of the plan."""
        return plan_request(self.plan, batch, self.reader.samples, self.anchors_of_row)

    def shares(self, step: int, world_size: int) -> list[list[int]]:
        """Batches of a step that each rank computes, ascending."""
        return share_step(self.plan, self.costs, step, world_size)

    def requests(self, from_step: int, rank: int, world_size: int) -> Iterator[BatchRequest]:
        """Ask for a rank's batches of every step from ``from_step`` on, in plan order."""
        for step in range(from_step, self.plan.num_steps):
            for batch in self.shares(step, world_size)[rank]:
                yield self.request(batch)


def probe_largest_batch(learner: Learner, work: Work) -> None:
    """Compute the batch that needs the most memory, without an update, so that running out of it shows at once.

    Raises:
        UserError: If memory does not suffice.
    """
    batch = int(np.argmax(work.costs))
    request = work.request(batch)
    try:
        learner.probe(work.reader.read(request))
    except RuntimeError as error:
        # On a CPU torch has no class of its own for it.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise UserError(
            f"out of memory on the largest batch of the plan (batch {batch}: {len(request.rows)} samples, "
            f"{int(request.num_tokens.sum())} tokens, {int(request.num_anchors.sum())} blocks), before step 0. "
            "Set plan.anchor_budget or lower plan.token_budget or loss.num_anchors"
        ) from None
