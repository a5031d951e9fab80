"""One extraction per store: a lock file that names host and process and dies with its holder."""

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from dflash_tools.errors import StoreError
from dflash_tools.store.files import make_folder

LOCK_NAME = "extract.lock"


# Locks of this process: record locks do not keep a process from itself, and closing any descriptor of the file,
# a reader's too, would give the lock up.
_held: set[Path] = set()


class StoreLock:
    """Hold a store against a second extraction; use as a context manager.

    The kernel's record lock is the truth on one machine: it goes with its process, is not inherited by forked
    children, and so a crash leaves no lock behind. The content of the file names the holder, and guards a store on
    a network disk against another host.
    """

    def __init__(self, store: Path) -> None:
        self.path = store / LOCK_NAME
        self._descriptor: int | None = None

    def __enter__(self) -> "StoreLock":
        make_folder(self.path.parent)
        self.path = self.path.parent.resolve() / LOCK_NAME
        if self.path in _held:
            raise StoreError(f"{self.path.parent}: this process extracts into it already; wait until it is done")
        while self._descriptor is None:
            self._descriptor = self._acquire()
        _held.add(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._descriptor is not None
        # Removed while still locked; whoever opened the old file sees that it is no longer the one at this path.
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self.path)

    def _acquire(self) -> int | None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(self._refusal(_holder(descriptor))) from None
            if not _is_same_file(descriptor, self.path):
                os.close(descriptor)
                return None
            holder = _holder(descriptor)
            if holder is not None and holder[0] != socket.gethostname():
                raise StoreError(
                    f"{self._refusal(holder)} If that process is gone, remove {self.path} and run extract again"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _refusal(self, holder: tuple[str, int] | None) -> str:
        who = f"process {holder[1]} on host {holder[0]}" if holder else "another process"
        return f"{self.path.parent}: {who} extracts into this store; wait for it or stop it first."


def _holder(descriptor: int) -> tuple[str, int] | None:
    """Host and process id in an open lock file; None if nothing whole stands there."""
    try:
        document = json.loads(os.pread(descriptor, 4096, 0))
        return str(document["host"]), int(document["pid"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
