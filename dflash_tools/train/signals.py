"""SIGTERM and Ctrl-C: remembered, and answered at the next step boundary."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class StopSignal:
    """Catches SIGTERM and SIGINT while it is entered; a second one has the earlier effect."""

    def __init__(self) -> None:
        self.signum = 0  # 0 = none came
        self._earlier: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the caller keeps its own handling.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._earlier[signum] = signal.signal(signum, self._remember)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)
        self._earlier = {}
