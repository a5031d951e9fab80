"""Files that are whole or not there: temp name, fsync, rename, fsync of the folder."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TEMP_SUFFIX = ".tmp"
_MAX_BUFFERS = 512  # buffers per writev; Linux allows 1,024
_MAX_BYTES = 64 << 20  # bytes per writev

Buffer = Any  # bytes or a flat uint8 array


def write_file(path: Path, buffers: Sequence[Buffer]) -> tuple[int, str]:
    """Write buffers one after another to a file that appears only when it is complete and on disk.

    Args:
        path: Final name; its folder must exist.
        buffers: Bytes or flat uint8 arrays; they are not copied.

    Returns:
        Size in bytes and SHA-256 of the content.

    Raises:
        OSError: If the disk is full or refuses; the temp file is removed.
    """
    temp = path.with_name(path.name + TEMP_SUFFIX)
    try:
        # The checksum is made by a second thread while the disk works.
        with ThreadPoolExecutor(max_workers=1) as pool, temp.open("wb", buffering=0) as file:
            digest = pool.submit(_hash, buffers)
            _write_all(file.fileno(), buffers)
            os.fsync(file.fileno())
            checksum = digest.result()
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return sum(map(_size, buffers)), checksum


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


def _size(buffer: Buffer) -> int:
    return memoryview(buffer).nbytes


def _hash(buffers: Sequence[Buffer]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    pending = [memoryview(buffer) for buffer in buffers if _size(buffer)]
    first = 0
    while first < len(pending):
        stop, num_bytes = first, 0
        while stop < len(pending) and stop - first < _MAX_BUFFERS and num_bytes < _MAX_BYTES:
            num_bytes += pending[stop].nbytes
            stop += 1
        written = os.writev(descriptor, pending[first:stop])
        while first < stop and written >= pending[first].nbytes:
            written -= pending[first].nbytes
            first += 1
        if written:
            pending[first] = pending[first][written:]
