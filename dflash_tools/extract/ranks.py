"""Several processes on one store: each takes its share of one fixed list, and the first one finishes.

Only the file system is between them: a lock file per process says that it lives, commit records say what is done.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_tools.errors import StoreError
from dflash_tools.extract.progress import Progress
from dflash_tools.extract.record import ExtractionRecord, read_record
from dflash_tools.extract.world import World
from dflash_tools.store.lock import LOCK_NAME, StoreLock
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.writer import StoreWriter

RANKS_NAME = "ranks"
POLL_SECONDS = 0.2
START_SECONDS = 600.0  # a process that never showed itself for so long is taken for dead


def share_of(shards: Sequence[tuple[int, int]], world: World) -> list[tuple[int, int]]:
    """The shards of this process: every ``world_size``-th of the list."""
    return list(shards[world.rank :: world.world_size])


def rank_lock(store: Path, rank: int) -> StoreLock:
    """The sign of life of one process; use as a context manager."""
    return StoreLock(store / RANKS_NAME / str(rank))


def wait_for_record(store: Path) -> ExtractionRecord | None:
    """Wait until the first process has prepared the store; None if the store is finished already."""
    while True:
        if (store / MANIFEST_NAME).exists():
            return None
        record = read_record(store)
        if record is not None:
            return record
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
    """Whether a process holds its lock; on this host, whether it still runs."""
    try:
        holder = json.loads((store / RANKS_NAME / str(rank) / LOCK_NAME).read_bytes())
        host, pid = str(holder["host"]), int(holder["pid"])
    except FileNotFoundError:
        return False
    except ValueError:  # it is being written
        return True
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_signs(store: Path) -> None:
    """Remove what the processes left to show themselves."""
    folder = store / RANKS_NAME
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        (path / LOCK_NAME).unlink(missing_ok=True)
        path.rmdir()
    folder.rmdir()
