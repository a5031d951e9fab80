"""How far long work is, on stderr: a bar on a terminal, plain lines at intervals elsewhere."""

import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 15.0

ItemT = TypeVar("ItemT")


class Progress:
    """Counts what is done of one piece of work; a silent one (other ranks) shows nothing."""

    def __init__(self, title: str, total: int, unit: str, *, done: int = 0, silent: bool = False) -> None:
        """Start at ``done`` of ``total`` units; the clock runs from ``begin`` on, or from the first unit."""
        self._title, self._total, self._unit = title, total, unit
        self._first = self._done = done
        self._silent = silent
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Start the clock, once everything is loaded."""
        self._started = self._last_line = time.monotonic()
        if self._bar is not None or self._silent or not sys.stderr.isatty():
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}"),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, figures="")
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int, figures: str | None = None) -> None:
        """Count so many more.

        Args:
            count: Units that are done.
            figures: What to show beside the count; default the rate in units.
        """
        self._done += count
        now = time.monotonic()
        done_here = max(self._done - self._first, 1)
        rate = done_here / max(now - self._started, 1e-9)
        shown = f"{rate:,.0f} {self._unit}/s" if figures is None else figures
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, figures=shown)
        elif now - self._last_line >= LINE_SECONDS or self._done >= self._total:
            self._last_line = now
            left = (self._total - self._done) / rate
            self.say(f"{self._title}: {self._done:,} of {self._total:,} {self._unit}, {shown}, about {left:.0f} s left")

    def say(self, sentence: str) -> None:
        """Show one sentence, above the bar."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(sentence, markup=False, highlight=False)
        else:
            say(sentence)


def track(items: Sequence[ItemT], title: str, unit: str) -> Iterator[ItemT]:
    """Yield items and show how far it is."""
    with Progress(title, len(items), unit) as progress:
        progress.begin()
        for item in items:
            yield item
            progress.advance(1)


def say(sentence: str) -> None:
    """Print one sentence to stderr."""
    print(sentence, file=sys.stderr, flush=True)
