"""What a run came to, from its own log."""

from pathlib import Path
from typing import Any

from dflash_tools.contracts.record import EvaluationRecord, TrainState
from dflash_tools.train.run_log import read_evaluations, read_steps


def summarise_run(run_dir: Path, state: TrainState, *, num_parameters: int) -> dict[str, Any]:
    """Sum up a run over all its attempts.

    Args:
        run_dir: The run folder.
        state: Where the run stands.
        num_parameters: Trained parameters.

    Returns:
        Held-out loss and estimated acceptance length (bonus token counted) of the first and the last weights, None
        without held-out samples, the latter also without a whole block among them; real tokens per second and the
        share of time spent waiting for data.
    """
    keys = ("num_tokens", "data_wait_seconds", "compute_seconds", "checkpoint_seconds")
    steps = list(read_steps(run_dir, keys).values())[: state.step]
    evaluations = list(read_evaluations(run_dir).values())
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    wait_seconds = sum(record["data_wait_seconds"] for record in steps)
    seconds = wait_seconds + sum(record["compute_seconds"] for record in steps)
    return {
        "run_dir": run_dir,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "num_parameters": num_parameters,
        "loss_before": first.loss if first else None,
        "loss_after": last.loss if last else None,
        "acceptance_length_before": _estimate(first),
        "acceptance_length_after": _estimate(last),
        "best_step": state.best_step,
        "tokens_per_second": sum(record["num_tokens"] for record in steps) / seconds if seconds else 0.0,
        "data_wait_share": wait_seconds / seconds if seconds else 0.0,
        "checkpoint_seconds": sum(record["checkpoint_seconds"] for record in steps),
        "train_seconds": seconds,
    }


def _estimate(evaluation: EvaluationRecord | None) -> float | None:
    return evaluation.acceptance_length if evaluation and evaluation.num_blocks else None
