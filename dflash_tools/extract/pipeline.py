"""From token ids to committed shards: forward here, encoding and writing in threads, bounded in bytes."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.errors import StoreError
from dflash_tools.extract.estimate import FULL_DISK
from dflash_tools.extract.forward import Forward, HostStates, write_safe_tokens
from dflash_tools.progress import Progress
from dflash_tools.store.writer import StoreWriter

PIPELINE_BYTES = 2 << 30  # states waiting to be written; one shard is always let through
NUM_WRITERS = 2

ShardKey = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """What one process did."""

    num_shards: int
    num_tokens: int
    seconds: float


def write_shards(
    writer: StoreWriter,
    forward: Forward,
    shards: Sequence[ShardKey],
    progress: Progress,
    *,
    pipeline_bytes: int = PIPELINE_BYTES,
) -> Written:
    """Compute and commit shards.

    Args:
        writer: Of the store; its token arrays are written.
        forward: Runs the target.
        shards: (bucket_id, shard_id) in the order in which they are to be made.
        progress: Told of every batch.
        pipeline_bytes: States that may wait to be written.

    Raises:
        StoreError: If a state is not finite (the sample is named), a sample does not fit into memory, or the disk is
            full; every committed shard stays.
    """
    started, num_tokens = time.monotonic(), 0
    queue = _Queue(pipeline_bytes)
    progress.begin()
    try:
        for bucket_id, shard_id in shards:
            samples = writer.samples_of(bucket_id, shard_id)
            length = int(samples["num_tokens"].sum())
            queue.make_room(length * writer.shape.bytes_per_token)
            states, split_forward_ids = _run_shard(writer, forward, samples, (bucket_id, shard_id), progress)
            queue.submit(writer, (bucket_id, shard_id), states, split_forward_ids, length)
            num_tokens += length
        queue.drain()
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise StoreError(_disk_full(writer, shards)) from None
    finally:
        queue.stop()
    return Written(num_shards=len(shards), num_tokens=num_tokens, seconds=time.monotonic() - started)


class _Queue:
    """Shards being written, and the bytes they hold."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="write-shard")
        self._pending: dict[Future[None], int] = {}

    def make_room(self, num_bytes: int) -> None:
        """Wait until so many bytes fit, or nothing waits any more; raises what a write raised."""
        self._collect(block=False)
        while self._pending and sum(self._pending.values()) + num_bytes > self._max_bytes:
            self._collect(block=True)

    def submit(
        self,
        writer: StoreWriter,
        key: ShardKey,
        states: list[HostStates],
        split_forward_ids: list[int],
        num_tokens: int,
    ) -> None:
        """Write one shard in the background."""
        future = self._pool.submit(_write, writer, key, states, split_forward_ids)
        self._pending[future] = num_tokens * writer.shape.bytes_per_token

    def drain(self) -> None:
        """Wait for all writes; raises what the first failed one raised."""
        while self._pending:
            self._collect(block=True)

    def stop(self) -> None:
        """Let running writes end and forget the others; nothing is left half written."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _collect(self, *, block: bool) -> None:
        if not self._pending:
            return
        done, _ = wait(self._pending, timeout=None if block else 0, return_when=FIRST_COMPLETED)
        for future in done:
            del self._pending[future]
            future.result()


def _run_shard(
    writer: StoreWriter, forward: Forward, samples: pl.DataFrame, key: ShardKey, progress: Progress
) -> tuple[list[HostStates], list[int]]:
    """Run all forward batches of a shard; states in the order of its samples, and the batches that were cut."""
    ids = [input_ids for input_ids, _ in writer.read_tokens(*key)]
    names = [
        f"sample {name} ({source} row {row})"
        for name, source, row in samples.select("sample_id", "source", "source_row").iter_rows()
    ]
    forward_ids = samples["forward_id"].to_numpy()
    states: list[HostStates] = []
    split: list[int] = []
    for forward_id in range(int(forward_ids.max()) + 1):
        # Samples of a shard lie in the order of their forward batches.
        first, stop = np.searchsorted(forward_ids, [forward_id, forward_id + 1])
        known = forward.safe_tokens
        batch, was_cut = forward.run(ids[first:stop], names[first:stop])
        states += batch
        if was_cut:
            split.append(forward_id)
        if forward.safe_tokens is not None and forward.safe_tokens != known:
            write_safe_tokens(writer.store, forward.safe_tokens)
            lengths = [len(sample) for sample in ids[first:stop]]
            progress.say(
                f"out of memory in bucket {key[0]}, shard {key[1]}, batch {forward_id} ({len(lengths)} samples of up "
                f"to {max(lengths)} tokens); going on with batches of at most {forward.safe_tokens} padded tokens"
            )
        progress.advance(sum(len(sample) for sample in ids[first:stop]))
    return states, split


def _write(writer: StoreWriter, key: ShardKey, states: list[HostStates], split_forward_ids: list[int]) -> None:
    samples: list[NDArray[np.uint16]] = [bits for batch in states for bits in batch.samples()]
    last = None
    if writer.shape.last_hidden_state:
        last = [np.ascontiguousarray(bits[:, -1]) for bits in samples]
        samples = [np.ascontiguousarray(bits[:, :-1]) for bits in samples]
    writer.write_shard(*key, samples, last, split_forward_ids=split_forward_ids)


def _disk_full(writer: StoreWriter, shards: Sequence[ShardKey]) -> str:
    committed = writer.committed()
    missing = [key for key in shards if key not in committed]
    needed = sum(int(writer.samples_of(*key)["num_tokens"].sum()) for key in missing) * writer.shape.bytes_per_token
    return (
        f"{writer.store}: the disk is full with {len(missing)} of {len(writer.shards())} shards to go, which need "
        f"about {needed / 1e9:.3g} GB; {writer.free_bytes() / 1e9:.3g} GB are free. Make room and run the same command "
        "again, or finish over what is there with --close"
    )
