"""Progress of a conversion on stderr: a bar on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 15.0


class Progress:
    """Counts what is done of one piece of work."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        """Start at zero of ``total`` files or tokens."""
        self._title, self._total, self._unit = title, max(total, 1), unit
        self._done = 0
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=self._total, rate="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count so many more."""
        self._done += count
        now = time.monotonic()
        rate = self._done / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{rate:,.0f} {self._unit}/s")
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            left = (self._total - self._done) / max(rate, 1e-9)
            say(
                f"{self._title}: {self._done:,} of {self._total:,} {self._unit}, {rate:,.0f} {self._unit}/s, "
                f"about {left:.0f} s left"
            )


def say(sentence: str) -> None:
    """Print one sentence to stderr."""
    print(sentence, file=sys.stderr, flush=True)
