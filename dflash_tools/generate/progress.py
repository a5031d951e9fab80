"""Progress of a generation on stderr: a bar on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 15.0


class Progress:
    """Counts conversations and the tokens that the target wrote."""

    def __init__(self, total: int) -> None:
        """Args: conversations that are to be answered."""
        self._total = total
        self._done = 0
        self._num_tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (
                TextColumn("generate"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("generate", total=self._total, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_conversations: int, num_tokens: int) -> None:
        """Count conversations that are over and the tokens of their answers."""
        self._done += num_conversations
        self._num_tokens += num_tokens
        now = time.monotonic()
        rate = f"{self._num_tokens / max(now - self._started, 1e-9):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=rate)
        elif self._done and (now - self._last_line >= LINE_SECONDS or self._done >= self._total):
            self._last_line = now
            left = (now - self._started) / self._done * (self._total - self._done)
            line = f"generate: {self._done:,} of {self._total:,} conversations, {rate}, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
