"""What a person sees while a run trains: a live line on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_tools.contracts.record import EvaluationRecord, StepRecord

PLAIN_INTERVAL_SECONDS = 15.0


class TrainProgress:
    """Shows steps on stderr; a silent one (other ranks) shows nothing."""

    def __init__(self, num_steps: int, *, done: int, silent: bool = False) -> None:
        """Start at ``done`` of ``num_steps`` updates."""
        self._num_steps = num_steps
        self._first = done
        self._silent = silent
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        if not silent and sys.stderr.isatty():
            columns = (
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.fields[figures]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("train", total=num_steps, completed=done, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_step(self, record: StepRecord) -> None:
        """Show one update."""
        done = record.step + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=_figures(record))
            return
        now = time.monotonic()
        if self._silent or (now - self._last_line < PLAIN_INTERVAL_SECONDS and done != self._num_steps):
            return
        self._last_line = now
        left = (now - self._started) / (done - self._first) * (self._num_steps - done)
        self._print(f"step {done}/{self._num_steps} · {_figures(record)} · {timedelta(seconds=round(left))} left")

    def show_evaluation(self, record: EvaluationRecord) -> None:
        """Show one held-out evaluation."""
        self.say(
            f"held out after {record.step} steps: loss {record.loss:.4f}, "
            f"acceptance length {record.acceptance_length:.3f} (estimate, bonus token counted)"
        )

    def say(self, sentence: str) -> None:
        """Show one sentence, above the bar."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(sentence, markup=False, highlight=False)
        else:
            self._print(sentence)

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _figures(record: StepRecord) -> str:
    seconds = record.data_wait_seconds + record.compute_seconds + record.checkpoint_seconds
    wait = record.data_wait_seconds / seconds if seconds else 0.0
    return (
        f"loss {record.loss:.3f} · accept {record.acceptance_length:.2f} · grad {record.grad_norm:.2f} · "
        f"{record.tokens_per_second:,.0f} tokens/s · data wait {wait:.0%}" + (" · skipped" if record.skipped else "")
    )
