"""TensorBoard curves: a few scalars, bounded in size, without a fold after a restart.

The horizontal axis counts updates done: the record of step s is drawn at s + 1, an evaluation after n updates at n.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.utils.tensorboard as tensorboard
from torch.utils.tensorboard.summary import hparams

from dflash_tools.contracts.record import EvaluationRecord, StepRecord
from dflash_tools.contracts.run_folder import TENSORBOARD_DIR

MAX_POINTS = 5000
"""Most points of a curve: with six buckets there are some twenty curves, so a run of any length stays under 10 MB."""

_LAYOUT = {
    "training": {
        "loss": ["Multiline", ["train/loss", "held_out/loss"]],
        "acceptance length": ["Multiline", ["train/acceptance_length", "held_out/acceptance_length"]],
        "accuracy by slot (held out)": ["Multiline", ["held_out/accuracy_slot_.*"]],
    },
    "by bucket": {
        "loss": ["Multiline", ["train/loss_bucket_.*"]],
        "loss (held out)": ["Multiline", ["held_out/loss_bucket_.*"]],
        "acceptance length (held out)": ["Multiline", ["held_out/acceptance_length_bucket_.*"]],
    },
    "composition": {
        "tokens by bucket": ["Multiline", ["composition/tokens_bucket_.*"]],
        "padding efficiency": ["Multiline", ["composition/padding_efficiency"]],
        "anchors per step": ["Multiline", ["composition/num_anchors"]],
    },
    "timing": {
        "tokens per second": ["Multiline", ["timing/tokens_per_second"]],
        "share of time waiting for data": ["Multiline", ["timing/data_wait_share"]],
        "seconds held up by checkpoints": ["Multiline", ["timing/checkpoint_seconds"]],
    },
}


class Curves:
    """Writes scalars of step and evaluation records; without a whole block there is no acceptance length to draw."""

    def __init__(self, run_dir: Path, *, from_step: int, num_steps: int) -> None:
        """Open a writer that hides points past ``from_step`` of earlier attempts."""
        self._every = max(1, -(-num_steps // MAX_POINTS))
        self._num_steps = num_steps
        self._writer = tensorboard.SummaryWriter(run_dir / TENSORBOARD_DIR, purge_step=from_step + 1)
        if from_step == 0:
            self._writer.add_custom_scalars(_LAYOUT)

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Show the run's settings in the HParams tab.

        Args:
            settings: Flat names to numbers, strings or booleans; other values are shown as text.
        """
        shown = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in settings.items()
        }
        metrics = {"held_out/loss": 0.0, "held_out/acceptance_length": 0.0}
        writer = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(shown, metrics):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def write_step(self, record: StepRecord) -> None:
        """Draw one step, if its turn has come; the last one always."""
        at = record.step + 1
        if at % self._every and at != self._num_steps:
            return
        seconds = record.data_wait_seconds + record.compute_seconds + record.checkpoint_seconds
        scalars = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.learning_rate,
            "composition/padding_efficiency": record.padding_efficiency,
            "composition/num_anchors": record.num_anchors,
            "timing/tokens_per_second": record.tokens_per_second,
            "timing/data_wait_share": record.data_wait_seconds / seconds if seconds else 0.0,
            "timing/checkpoint_seconds": record.checkpoint_seconds,
        }
        if record.num_anchors > sum(batch.num_truncated_blocks for batch in record.batches):
            scalars["train/acceptance_length"] = record.acceptance_length
        for bucket_id in sorted({batch.bucket_id for batch in record.batches}):
            batches = [batch for batch in record.batches if batch.bucket_id == bucket_id]
            weight = sum(batch.label_weight for batch in batches)
            scalars[f"composition/tokens_bucket_{bucket_id}"] = sum(batch.num_tokens for batch in batches)
            if weight:
                loss_sum = sum(batch.loss * batch.label_weight for batch in batches)
                scalars[f"train/loss_bucket_{bucket_id}"] = loss_sum / weight
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, at)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Draw one held-out evaluation."""
        scalars = {"held_out/loss": record.loss}
        if record.num_blocks:
            scalars["held_out/acceptance_length"] = record.acceptance_length
        scalars |= {f"held_out/accuracy_slot_{k}": a for k, a in enumerate(record.accuracy_by_slot, start=1)}
        for bucket in record.by_bucket:
            scalars[f"held_out/loss_bucket_{bucket.bucket_id}"] = bucket.loss
            if bucket.num_blocks:
                scalars[f"held_out/acceptance_length_bucket_{bucket.bucket_id}"] = bucket.acceptance_length
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, record.step)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
