"""One process per run folder: a lock that dies with its holder."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_tools.errors import ResumeError

LOCK_FILE = "train.lock"


@contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Hold a run folder against a second training; the folder is made if it is not there.

    The kernel's record lock is the truth and goes with its process, so a crash leaves no lock behind.

    Raises:
        ResumeError: If another process trains in the folder; it is named.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "a process that has not said its name yet"
            raise ResumeError(f"{run_dir}: {holder} trains here; wait until it ends, or stop it first") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is still locked
            if not any(run_dir.iterdir()):  # the run was refused before it began
                run_dir.rmdir()
