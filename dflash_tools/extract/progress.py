"""Progress of an extraction on stderr: a bar on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 15.0


class Progress:
    """Counts tokens; a silent one (other ranks) shows nothing."""

    def __init__(self, total_tokens: int, *, silent: bool = False) -> None:
        """Start at zero of ``total_tokens`` tokens that are left to run."""
        self._total = max(total_tokens, 1)
        self._silent = silent
        self._done = 0
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Start the clock: the target is loaded, the first batch is next."""
        self._started = self._last_line = time.monotonic()
        if self._silent or not sys.stderr.isatty():
            return
        columns = (
            TextColumn("extract"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("extract", total=self._total, rate="")
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_tokens: int) -> None:
        """Count tokens that went through the target."""
        self._done += num_tokens
        now = time.monotonic()
        rate = self._done / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{rate:,.0f} tokens/s")
        elif now - self._last_line >= LINE_SECONDS or self._done >= self._total:
            self._last_line = now
            left = (self._total - self._done) / max(rate, 1e-9)
            self.say(
                f"extract: {self._done:,} of {self._total:,} tokens, {rate:,.0f} tokens/s, about {left:.0f} s left"
            )

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(sentence, markup=False, highlight=False)
        else:
            print(sentence, file=sys.stderr, flush=True)
