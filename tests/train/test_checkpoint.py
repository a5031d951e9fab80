import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from dflash_tools.contracts.record import TrainState
from dflash_tools.contracts.run_folder import checkpoint_dir, list_checkpoints, newest_checkpoint, read_state
from dflash_tools.errors import ResumeError, UserError
from dflash_tools.train import checkpoint as checkpoint_module
from dflash_tools.train.checkpoint import (
    NonFiniteWeightsError,
    load_checkpoint,
    remove_old_checkpoints,
    remove_unfinished,
    take_snapshot,
    verify_checkpoint,
    write_checkpoint,
)
from dflash_tools.train.saver import CheckpointSaver


def make_state(step, best_step=None):
    return TrainState(
        step=step, attempt=0, plan_fingerprint="p", store_fingerprints=("s",), drafter_fingerprint="d",
        settings_fingerprint="t", threads=1, skipped_steps=0, consecutive_skipped_steps=0, best_step=best_step,
        best_loss=None, versions={}, files={},
    )  # fmt: skip


def make_snapshot(step=1, value=1.0, best_step=None):
    weights = {"fc.weight": torch.full((4, 3), value), "norm.weight": torch.ones(3)}
    moments = {"step.fc.weight": torch.tensor(float(step)), "exp_avg.fc.weight": torch.zeros(4, 3)}
    return take_snapshot(make_state(step, best_step), weights, moments)


def test_a_checkpoint_comes_back_bit_for_bit_and_a_person_can_read_its_state(tmp_path):
    """RC-08: plain tensors and JSON, nothing pickled."""
    folder = write_checkpoint(tmp_path, make_snapshot(step=1000))
    assert folder == tmp_path / "checkpoints" / "step-0001000"
    assert sorted(path.name for path in folder.iterdir()) == [
        "drafter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    state = read_state(folder)
    assert state.step == 1000
    assert set(state.files) == {"drafter.safetensors", "optimizer.safetensors"}
    drafter, optimizer = load_checkpoint(folder)
    assert torch.equal(drafter["fc.weight"], torch.ones(4, 3))
    assert optimizer["step.fc.weight"] == 1000
    assert json.loads((folder / "state.json").read_text())["plan_fingerprint"] == "p"


def test_half_written_or_damaged_checkpoints_are_passed_over_and_named(tmp_path):
    """RC-01."""
    for step in (900, 9000, 10000, 11000, 12000):
        write_checkpoint(tmp_path, make_snapshot(step))
    (checkpoint_dir(tmp_path, 12000) / "state.json").unlink()
    os.truncate(checkpoint_dir(tmp_path, 11000) / "drafter.safetensors", 20)
    file = checkpoint_dir(tmp_path, 10000) / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (tmp_path / "checkpoints" / "step-13000-copy").mkdir()
    path, state, problems = newest_checkpoint(tmp_path)
    assert (path, state.step) == (checkpoint_dir(tmp_path, 9000), 9000)
    assert len(problems) == 3
    assert "state.json is missing" in problems[0]
    assert "20 bytes, expected" in problems[1]
    assert "SHA-256 differs" in problems[2]


def test_without_any_whole_checkpoint_the_error_names_them_all(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, make_snapshot(5))
    (checkpoint_dir(tmp_path, 5) / "drafter.safetensors").unlink()
    with pytest.raises(ResumeError, match=r"no whole checkpoint: .*step-0000005/drafter.safetensors: missing"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, 900, [900, 10000]), (2, 900, [900, 9000, 10000]), (1, None, [10000]), (9, None, [900, 1000, 9000, 10000])],
)
def test_retention_counts_by_number_and_spares_newest_and_best(tmp_path, keep, best, left):
    """RC-16."""
    for step in (900, 1000, 9000, 10000):
        write_checkpoint(tmp_path, make_snapshot(step))
    remove_old_checkpoints(tmp_path, newest=10000, keep=keep, best=best)
    assert list(list_checkpoints(tmp_path)) == left


def test_a_damaged_newer_folder_never_pushes_out_the_one_just_written(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, make_snapshot(step))
    (checkpoint_dir(tmp_path, 30) / "state.json").unlink()
    remove_old_checkpoints(tmp_path, newest=20, keep=1, best=None)
    assert list(list_checkpoints(tmp_path)) == [20, 30]
    write_checkpoint(tmp_path, make_snapshot(30))
    assert read_state(checkpoint_dir(tmp_path, 30)).step == 30


@pytest.mark.parametrize("where", ["drafter", "optimizer"])
def test_weights_that_are_not_finite_are_refused_and_healthy_ones_stay(tmp_path, where):
    """TN-04."""
    write_checkpoint(tmp_path, make_snapshot(5))
    sick = make_snapshot(10)
    next(iter(getattr(sick, where).values())).fill_(float("nan"))
    with pytest.raises(NonFiniteWeightsError, match=r"holds NaN or infinity.*last healthy checkpoint is step 5"):
        write_checkpoint(tmp_path, sick)
    saver = CheckpointSaver(tmp_path, keep=1, report=pytest.fail)
    saver.start(sick)
    with pytest.raises(NonFiniteWeightsError):
        saver.close()
    assert list(list_checkpoints(tmp_path)) == [5]


def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish_and_training_goes_on(tmp_path, monkeypatch):
    """RC-02."""
    said = []
    saver = CheckpointSaver(tmp_path, keep=5, report=said.append)
    saver.start(make_snapshot(1))
    saver.wait()
    # A limit on file size is what a full disk looks like to the writer.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        saver.start(make_snapshot(2))
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "checkpoint of step 2 could not be written" in said[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000001"]
    with pytest.raises(UserError, match=r"last checkpoint could not be written.*--resume"):
        saver.close()
    saver.start(make_snapshot(3))
    saver.close()
    assert list(list_checkpoints(tmp_path)) == [1, 3]
    assert (saver.num_saved, saver.num_failed) == (2, 1)


@pytest.mark.parametrize("ask", ["check", "close"])
def test_an_unforeseen_error_of_the_writer_ends_the_run(tmp_path, monkeypatch, ask):
    def fail(run_dir, snapshot):
        raise MemoryError("no room for the file")

    monkeypatch.setattr("dflash_tools.train.saver.write_checkpoint", fail)
    saver = CheckpointSaver(tmp_path, keep=1, report=pytest.fail)
    saver.start(make_snapshot(1))
    saver.join()
    with pytest.raises(MemoryError, match="no room for the file"):
        getattr(saver, ask)()


def test_a_checkpoint_that_does_not_read_back_is_a_failure_of_the_disk(tmp_path):
    folder = write_checkpoint(tmp_path, make_snapshot(1))
    os.truncate(folder / "drafter.safetensors", 20)
    with pytest.raises(OSError, match="cannot be read back"):
        verify_checkpoint(folder, make_snapshot(1))


def test_a_background_save_holds_the_weights_of_its_moment_and_saves_never_pile_up(tmp_path, monkeypatch):
    """RC-14."""
    running, most = [], []
    real = checkpoint_module.write_checkpoint

    def slow(run_dir, snapshot):
        running.append(snapshot)
        most.append(len(running))
        time.sleep(0.005)
        folder = real(run_dir, snapshot)
        running.remove(snapshot)
        return folder

    monkeypatch.setattr("dflash_tools.train.saver.write_checkpoint", slow)
    weight = torch.zeros(4, 3)
    saver = CheckpointSaver(tmp_path, keep=20, report=pytest.fail)
    for step in range(1, 21):
        weight.fill_(step)
        saver.wait()
        saver.start(take_snapshot(make_state(step), {"w": weight}, {}))
        weight.fill_(-1)
    saver.close()
    assert max(most) == 1
    for step, folder in list_checkpoints(tmp_path).items():
        assert torch.equal(load_checkpoint(folder)[0]["w"], torch.full((4, 3), float(step)))


def test_what_a_killed_writer_left_is_removed(tmp_path):
    write_checkpoint(tmp_path, make_snapshot(1))
    (tmp_path / "checkpoints" / ".unfinished-step-0000002").mkdir()
    assert [path.name for path in remove_unfinished(tmp_path)] == [".unfinished-step-0000002"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000001"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path):
    """RC-01: SIGKILL at 20 random times while checkpoints are written and old ones removed."""
    program = textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_checkpoint import make_state
        from dflash_tools.train.checkpoint import *
        run = Path(sys.argv[1])
        first = int(sys.argv[3])
        print("ready", flush=True)
        for step in range(first, first + 100000):
            write_checkpoint(run, take_snapshot(make_state(step), {"w": torch.full((20000,), float(step))}, {}))
            remove_old_checkpoints(run, newest=step, keep=2, best=None)
    """)
    first = 0
    for trial in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent), str(first)],
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(0.02 + 0.013 * trial)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        newest = newest_checkpoint(tmp_path)
        if newest is not None:
            path, state, _ = newest
            assert torch.equal(load_checkpoint(path)[0]["w"], torch.full((20000,), float(state.step)))
            first = state.step + 1
        remove_unfinished(tmp_path)
    assert first > 0
