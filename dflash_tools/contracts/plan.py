"""The batch plan: the order of a whole run as read-only columns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.fingerprint import fingerprint_of_arrays, fingerprint_of_json

PLAN_SCHEMA_VERSION = 1
PACKED_BUCKET_ID = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchPlan:
    """Every batch of a run, in order.

    A step is a run of batches with the same entry in ``steps``: one optimizer update.

    Attributes:
        epochs: Epoch of each batch. Shape: (num_batches,), int32, ascending.
        steps: Step of each batch, counted over the whole run from 0. Shape: (num_batches,), int64, ascending.
        bucket_ids: Bucket of each batch; -1 for a packed batch. Shape: (num_batches,), int32.
        offsets: Batch b holds ``sample_rows[offsets[b]:offsets[b + 1]]``. Shape: (num_batches + 1,), int64.
        sample_rows: Rows of the sample index. Shape: (sum of batch sizes,), int64.
        settings: The settings that made the plan, JSON-able.
        store_fingerprint: Identity of the store (or stores) the rows point into; "" if unknown.
        left_out: Samples that are in no batch, by reason.
    """

    epochs: NDArray[np.int32]
    steps: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    settings: dict[str, Any]
    store_fingerprint: str = ""
    left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_batches = len(self.steps)
        if not (len(self.epochs) == len(self.bucket_ids) == num_batches == len(self.offsets) - 1):
            raise ValueError(
                f"columns disagree on the number of batches: epochs {len(self.epochs)}, steps {num_batches}, "
                f"bucket_ids {len(self.bucket_ids)}, offsets {len(self.offsets)} (one more than batches)"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.sample_rows) or np.any(np.diff(self.offsets) < 1):
            raise ValueError("offsets must rise from 0 to len(sample_rows), and no batch may be empty")
        for column in (self.epochs, self.steps, self.bucket_ids, self.offsets, self.sample_rows):
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_steps(self) -> int:
        """Optimizer updates in the run."""
        return int(self.steps[-1]) + 1 if len(self.steps) else 0

    def rows(self, batch: int) -> NDArray[np.int64]:
        """Sample rows of one batch. Shape: (batch_size,)."""
        return self.sample_rows[self.offsets[batch] : self.offsets[batch + 1]]

    def batches_of_step(self, step: int) -> range:
        """Positions of the batches that make one optimizer update."""
        first, last = np.searchsorted(self.steps, [step, step + 1])
        return range(int(first), int(last))

    def fingerprint(self) -> str:
        """Identity of the order: 64 hex digits over columns, settings and store."""
        columns = fingerprint_of_arrays(self.epochs, self.steps, self.bucket_ids, self.offsets, self.sample_rows)
        return fingerprint_of_json([PLAN_SCHEMA_VERSION, columns, self.settings, self.store_fingerprint])
