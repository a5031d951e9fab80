"""Progress of decoding: a bar on a terminal, a plain line at intervals elsewhere; always on stderr."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 20.0

ItemT = TypeVar("ItemT")


def show_progress(items: Sequence[ItemT], title: str) -> Iterator[ItemT]:
    """Yield items and show how far it is and how long it takes."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield from progress.track(items, description=title)
        return
    started = shown = time.monotonic()
    for number, item in enumerate(items):
        yield item
        now, done = time.monotonic(), number + 1
        if now - shown >= LINE_SECONDS and done < len(items):
            left = (now - started) / done * (len(items) - done)
            print(f"{title}: {done} of {len(items)}, about {left:.0f} s left", file=sys.stderr, flush=True)
            shown = now
