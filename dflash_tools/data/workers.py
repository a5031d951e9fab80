"""Rendering and tokenising in several processes; results come back in order, and few chunks are under way at a time."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_tools.data.manifest import ResolvedSource
from dflash_tools.data.raw import RawRow
from dflash_tools.data.rows import RowOutcome, RowReader
from dflash_tools.data.sample import TokenSample
from dflash_tools.errors import DataError

RowT = TypeVar("RowT", bound=tuple[ResolvedSource, str, RawRow])

# Two arrays for a whole chunk are much cheaper to send than two for each sample.
Packed = tuple[list[tuple[str, str, set[str], int, list[tuple[str, int]]]], NDArray[np.int32], NDArray[np.uint8]]

_reader: RowReader | None = None


def read_in_processes(
    reader: RowReader, chunks: Iterator[list[RowT]], num_processes: int
) -> Iterator[tuple[list[RowT], list[RowOutcome]]]:
    """Read chunks of rows in worker processes.

    Args:
        reader: Copied to every process.
        chunks: Rows with their source.
        num_processes: Number of processes.

    Yields:
        Each chunk with the outcomes of its rows, in order.

    Raises:
        DataError: If a process is gone, most likely for lack of memory.
    """
    # Fork would copy locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, context, _start, (reader,))
    waiting: deque[tuple[list[RowT], Future[Packed]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_read, [(row, source.loss_on) for source, _, row in chunk])))
            if len(waiting) > 2 * num_processes:
                done, future = waiting.popleft()
                yield done, _unpack(future.result())
        while waiting:
            done, future = waiting.popleft()
            yield done, _unpack(future.result())
    except BrokenProcessPool:
        raise DataError(
            "a tokenising process was ended from outside, most likely for lack of memory; free some and run again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(reader: RowReader) -> None:
    global _reader
    _reader = reader
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read(rows: list[tuple[RawRow, str]]) -> Packed:
    assert _reader is not None
    outcomes = _reader.read_many(rows)
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    heads = [
        (
            outcome.reason,
            outcome.detail,
            outcome.notes,
            outcome.key,
            [(sample.conversation_id, len(sample.input_ids)) for sample in outcome.samples],
        )
        for outcome in outcomes
    ]
    input_ids = np.concatenate([np.empty(0, np.int32), *(sample.input_ids for sample in samples)])
    loss_mask = np.concatenate([np.empty(0, np.uint8), *(sample.loss_mask for sample in samples)])
    return heads, input_ids, loss_mask


def _unpack(packed: Packed) -> list[RowOutcome]:
    heads, input_ids, loss_mask = packed
    outcomes = []
    start = 0
    for reason, detail, notes, key, lengths in heads:
        samples = []
        for conversation_id, length in lengths:
            part = slice(start, start + length)
            samples.append(
                TokenSample(input_ids=input_ids[part], loss_mask=loss_mask[part], conversation_id=conversation_id)
            )
            start += length
        outcomes.append(RowOutcome(samples, reason, detail, notes, key))
    return outcomes
