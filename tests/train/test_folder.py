"""What a run folder is kept from."""

import json
import shutil
import subprocess
import sys

import pytest
from make_store import make_store

from dflash_tools.errors import ResumeError, StoreError
from dflash_tools.train.lock import hold_run
from dflash_tools.train.run import run_training

HOLD = """
import sys, time
from pathlib import Path
from dflash_tools.train.lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_told_who_trains_and_a_killed_one_leaves_no_lock(tmp_path):
    run_dir = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ResumeError, match=f"process {holder.pid} on .* trains here"), hold_run(run_dir):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with hold_run(run_dir):
        assert (run_dir / "train.lock").exists()
    assert not run_dir.exists(), "nothing was written, so nothing stays"


def test_a_folder_of_something_else_is_never_trained_into(store_dir, make_config, tmp_path):
    """CL-05."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for resume, words in ((False, "is not empty"), (True, "no run.json here, but thesis.txt")):
        with pytest.raises(ResumeError, match=words):
            run_training(make_config(), [store_dir], tmp_path / "mine", resume=resume)
    (tmp_path / "a-file").touch()
    with pytest.raises(ResumeError, match="is a file"):
        run_training(make_config(), [store_dir], tmp_path / "a-file")


def test_damaged_frozen_parts_never_train(make_config, tmp_path):
    store = make_store(tmp_path / "store", [20, 30, 40, 50], validation_rows=[1])
    frozen = store / "target" / "frozen.safetensors"
    content = bytearray(frozen.read_bytes())
    content[-7] ^= 1
    frozen.write_bytes(content)
    with pytest.raises(StoreError, match=r"frozen\.safetensors: the bytes are not those"):
        run_training(make_config(), [store], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_one_store_holds_out_no_other_may_train_on(make_config, tmp_path):
    one = make_store(tmp_path / "one", [20, 30, 40, 50], validation_rows=[1])
    other = make_store(tmp_path / "other", [20, 30, 40, 50])
    with pytest.raises(StoreError, match="1 conversations are held out in one and training in another"):
        run_training(make_config(), [one, other], tmp_path / "run")


def test_a_broken_line_inside_the_log_is_said_before_anything_trains(store_dir, make_config, straight_run, tmp_path):
    run_dir = shutil.copytree(straight_run, tmp_path / "run")
    lines = (run_dir / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["step"] == 1
    (run_dir / "log.jsonl").write_text("\n".join([lines[0], '{"garbage', *lines[2:], ""]))
    with pytest.raises(ResumeError, match="is no record"):
        run_training(make_config(), [store_dir], run_dir, resume=True)
