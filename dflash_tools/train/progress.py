"""What a person sees while a run trains."""

from dflash_tools.contracts.record import EvaluationRecord, StepRecord
from dflash_tools.progress import Progress


class TrainProgress(Progress):
    """Shows updates and held-out evaluations."""

    def show_step(self, record: StepRecord) -> None:
        """Show one update."""
        seconds = record.data_wait_seconds + record.compute_seconds + record.checkpoint_seconds
        wait = record.data_wait_seconds / seconds if seconds else 0.0
        self.advance(
            1,
            f"loss {record.loss:.3f} · accept {record.acceptance_length:.2f} · grad {record.grad_norm:.2f} · "
            f"{record.tokens_per_second:,.0f} tokens/s · data wait {wait:.0%}"
            + (" · skipped" if record.skipped else ""),
        )

    def show_evaluation(self, record: EvaluationRecord) -> None:
        """Show one held-out evaluation."""
        length = f"{record.acceptance_length:.3f} (estimate, bonus token counted)"
        if not record.num_blocks:
            length = f"not estimated: all {record.num_truncated_blocks} blocks are truncated"
        self.say(f"held out after {record.step} steps: loss {record.loss:.4f}, acceptance length {length}")
