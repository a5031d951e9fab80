"""Reading ahead: batches are made by reader threads in plan order, bounded in bytes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

RequestT = TypeVar("RequestT")
BatchT = TypeVar("BatchT")

NUM_READERS = 2


class Feed(Generic[RequestT, BatchT]):
    """Turns requests into batches, in their order, ahead of the consumer.

    The feed has no position of its own that would have to be saved: what comes next is decided by the requests alone,
    so neither the number of readers nor how far they are ahead can change what is trained on.
    """

    def __init__(
        self,
        requests: Iterable[RequestT],
        build: Callable[[RequestT], BatchT],
        *,
        num_bytes: Callable[[RequestT], int],
        max_bytes: int,
        num_readers: int = NUM_READERS,
    ) -> None:
        """Begin to read at once.

        Args:
            requests: What to make, in order; taken lazily.
            build: Makes one batch; called in reader threads.
            num_bytes: Memory that a batch will take.
            max_bytes: Bound on batches made or in the making and not yet taken; a single larger batch still passes.
            num_readers: Reader threads.
        """
        self._requests = iter(requests)
        self._build = build
        self._num_bytes = num_bytes
        self._max_bytes = max_bytes
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="feed")
        self._ahead: deque[tuple[Future[BatchT], int]] = deque()
        self._ahead_bytes = 0
        self._next_request: RequestT | None = next(self._requests, None)
        self.wait_seconds = 0.0
        self._read_ahead()

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        """Take the next batch; time spent waiting for it is added to ``wait_seconds``.

        Raises:
            StopIteration: After the last batch.
            StoreError: What reading this very batch raised; earlier batches are delivered first.
        """
        self._read_ahead()
        if not self._ahead:
            raise StopIteration
        started = time.perf_counter()
        future, num_bytes = self._ahead.popleft()
        batch = future.result()
        self.wait_seconds += time.perf_counter() - started
        self._ahead_bytes -= num_bytes
        self._read_ahead()
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the readers; what they have made is dropped."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _read_ahead(self) -> None:
        while self._next_request is not None:
            num_bytes = self._num_bytes(self._next_request)
            if self._ahead and self._ahead_bytes + num_bytes > self._max_bytes:
                return
            self._ahead.append((self._readers.submit(self._build, self._next_request), num_bytes))
            self._ahead_bytes += num_bytes
            self._next_request = next(self._requests, None)
