"""Files that are whole or not there: temp name, fsync, rename, fsync of the folder."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

TEMP_SUFFIX = ".tmp"
_MAX_BUFFERS = 512  # buffers per writev; Linux allows 1,024
_BATCH_BYTES = 8 << 20  # written together

Buffer = Any  # bytes or a flat uint8 array


def write_file(path: Path, buffers: Iterable[Buffer]) -> int:
    """Write buffers one after another to a file that appears only when it is complete and on disk.

    While the next buffers are made and copied to the page cache, a thread pushes what is there to the disk.

    Args:
        path: Final name; its folder must exist.
        buffers: Bytes or flat uint8 arrays; they are not copied. May be made on the way.

    Returns:
        Size in bytes.

    Raises:
        OSError: If the disk is full or refuses; the temp file is removed.
    """
    temp = path.with_name(path.name + TEMP_SUFFIX)
    size = 0
    try:
        with temp.open("wb", buffering=0) as file, _Pusher(file.fileno()) as pusher:
            for batch in _batches(buffers):
                size += _write_all(file.fileno(), batch)
                if size >= _BATCH_BYTES:
                    pusher.push()
            pusher.wait()
            os.fsync(file.fileno())
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size


class _Pusher:
    """Pushes what was written so far to the disk, in a thread of its own that small files never start."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(max_workers=1)  # starts its thread at the first task
        self._pushed: Future[None] | None = None

    def __enter__(self) -> "_Pusher":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def push(self) -> None:
        """Begin to push, unless the disk is still busy with the last time; its error is raised here, once."""
        if self._pushed is None or self._pushed.done():
            self.wait()
            self._pushed = self._pool.submit(os.fdatasync, self._descriptor)

    def wait(self) -> None:
        """Wait for the last push."""
        if self._pushed is not None:
            self._pushed.result()
            self._pushed = None


def checksum_of_bytes(content: Buffer) -> str:
    """SHA-256 of bytes in memory. Returns 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def files_below(folder: Path) -> list[Path]:
    """Every file in a folder and its sub-folders, ascending."""
    return sorted(Path(root) / name for root, _, names in os.walk(folder) for name in names)


def _batches(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    batch: list[Buffer] = []
    num_bytes = 0
    for buffer in buffers:
        batch.append(buffer)
        num_bytes += memoryview(buffer).nbytes
        if len(batch) == _MAX_BUFFERS or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _write_all(descriptor: int, batch: Sequence[Buffer]) -> int:
    views: list[memoryview[int]] = [memoryview(buffer) for buffer in batch]
    pending = [view for view in views if view.nbytes]
    total = sum(view.nbytes for view in pending)
    while pending:
        written = os.writev(descriptor, pending)
        while pending and written >= pending[0].nbytes:
            written -= pending.pop(0).nbytes
        if written:
            pending[0] = pending[0][written:]
    return total
