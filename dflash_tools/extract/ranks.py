"""Several processes on one store: each takes its share of one fixed list, and the first one finishes.

Only the file system is between them: a lock file per process says that it lives, commit records say what is done.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_tools.errors import StoreError
from dflash_tools.extract.record import ExtractionRecord, read_record
from dflash_tools.extract.world import World
from dflash_tools.progress import Progress
from dflash_tools.store.lock import LOCK_NAME, StoreLock
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.writer import StoreWriter

POLL_SECONDS = 0.2
START_SECONDS = 600.0  # a process that never showed itself for so long is taken for dead


def share_of(shards: Sequence[tuple[int, int]], world: World) -> list[tuple[int, int]]:
    """The shards of this process: every ``world_size``-th of the list."""
    return list(shards[world.rank :: world.world_size])


@contextlib.contextmanager
def rank_lock(store: Path, rank: int) -> Iterator[None]:
    """The sign of life of one process, beside the store."""
    folder = _signs(store) / str(rank)
    try:
        with StoreLock(folder):
            yield
    finally:
        _remove_folder(folder)
        _remove_folder(folder.parent)


def wait_for_record(store: Path) -> ExtractionRecord | None:
    """Wait until the first process has prepared the store; None if the store is finished already.

    Raises:
        StoreError: If the first process ended, or never began.
    """
    started, seen = time.monotonic(), False
    while True:
        # Looked at first: what a process leaves behind is complete once it is gone.
        alive = holds(store / LOCK_NAME)
        if (store / MANIFEST_NAME).exists():
            return None
        record = read_record(store)
        if record is not None:
            return record
        seen |= alive
        if not alive and (seen or time.monotonic() - started > START_SECONDS):
            raise StoreError(
                f"{store}: the first process ended before the store was prepared; run the same command again"
            )
        time.sleep(POLL_SECONDS)


def wait_for_others(writer: StoreWriter, shards: Sequence[tuple[int, int]], world: World, progress: Progress) -> None:
    """Wait until every shard is committed and the other processes are through.

    Args:
        writer: Of the store.
        shards: The list that all processes share.
        world: This process, rank 0.
        progress: Told once what is waited for.

    Raises:
        StoreError: If a process ended, or never began, with shards to go.
    """
    started = time.monotonic()
    seen: set[int] = set()
    for rank in range(1, world.world_size):
        told = False
        while True:
            alive = is_alive(writer.store, rank)
            missing = set(share_of(shards, World(rank, world.world_size))) - writer.committed()
            if not missing and not alive:
                break
            if alive:
                seen.add(rank)
            elif rank in seen or time.monotonic() - started > START_SECONDS:
                raise StoreError(
                    f"{writer.store}: process {rank} of {world.world_size} ended with {len(missing)} shards to go; "
                    "run the same command again"
                )
            if not told:
                progress.say(f"waiting for process {rank}: {len(missing)} shards to go")
                told = True
            time.sleep(POLL_SECONDS)
    remove_signs(writer.store)


def is_alive(store: Path, rank: int) -> bool:
    """Whether a process that is not the first holds its lock."""
    return holds(_signs(store) / str(rank) / LOCK_NAME)


def holds(lock: Path) -> bool:
    """Whether the process named in a lock file runs; one on another host is taken to run while its file is there."""
    try:
        holder = json.loads(lock.read_bytes())
        host, pid = str(holder["host"]), int(holder["pid"])
    except FileNotFoundError:
        return False
    except ValueError:  # it is being written
        return True
    return host != socket.gethostname() or _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # no such file system, or gone in this moment: the next look tells
        return True
    return status.rpartition(")")[2].split()[0] != "Z"  # killed, and not yet waited for


def remove_signs(store: Path) -> None:
    """Remove what killed processes left."""
    folder = _signs(store)
    with contextlib.suppress(FileNotFoundError):  # the last one to leave removes it
        for path in folder.iterdir():
            (path / LOCK_NAME).unlink(missing_ok=True)
            _remove_folder(path)
    _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    # Gone already, or another process's sign is still in it: both are as they should be.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _signs(store: Path) -> Path:
    # Not inside: the manifest names every file of a store.
    return store.with_name(f"{store.name}.ranks")
