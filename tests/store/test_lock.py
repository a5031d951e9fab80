import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from dflash_tools.errors import StoreError
from dflash_tools.store.lock import LOCK_NAME, StoreLock

HOLDER = """
import sys, time
from pathlib import Path
from dflash_tools.store.lock import StoreLock
with StoreLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def try_from_another_process(folder):
    """Who holds the store, as another process is told."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stderr.split("extract: ")[-1].split(": ")[-1].split(" extracts")[0]


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_who_holds_the_store(tmp_path, holder):
    """ST-10."""
    with pytest.raises(StoreError, match=f"process {holder.pid} on host {socket.gethostname()}"), StoreLock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_stale(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_NAME).is_file()
    with StoreLock(tmp_path):
        pass
    assert not (tmp_path / LOCK_NAME).exists()


def test_one_process_cannot_hold_a_store_twice(tmp_path):
    with StoreLock(tmp_path):
        with pytest.raises(StoreError, match="this process extracts into it already"), StoreLock(tmp_path):
            pass
        assert try_from_another_process(tmp_path) == f"process {os.getpid()} on host {socket.gethostname()}"
    with StoreLock(tmp_path):
        pass


def test_the_lock_of_another_host_is_respected(tmp_path):
    (tmp_path / LOCK_NAME).write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(StoreError, match=r"process 1 on host elsewhere .* remove .*extract.lock"), StoreLock(tmp_path):
        pass


def test_an_empty_lock_file_of_a_crash_is_stale(tmp_path):
    (tmp_path / LOCK_NAME).touch()
    with StoreLock(tmp_path):
        pass


def test_an_error_inside_gives_the_lock_up(tmp_path):
    with pytest.raises(KeyError), StoreLock(tmp_path):
        raise KeyError
    with StoreLock(tmp_path):
        pass
