"""Whatever stops a run, what it ends with is the same to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from make_store import make_store

from dflash_tools.contracts.run_folder import checkpoint_dir, find_checkpoint, list_checkpoints, read_card
from dflash_tools.errors import Interrupted, ResumeError
from dflash_tools.train import saver
from dflash_tools.train.loop import TrainingLoop
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations, read_steps
from dflash_tools.train.step import Learner

NUM_STEPS = 6


class Killed(Exception):
    pass


def kill_after(monkeypatch, step):
    """Fail right after the record of a step is written, before anything is saved."""
    show = TrainProgress.show_step

    def die(self, record):
        show(self, record)
        if record.step == step:
            raise Killed

    monkeypatch.setattr(TrainProgress, "show_step", die)


def signal_at(monkeypatch, step, signum=signal.SIGTERM):
    """Send this process a signal in the middle of a step."""
    count = TrainingLoop._count

    def send(self, update):
        if self.state.step == step:
            os.kill(os.getpid(), signum)
        count(self, update)

    monkeypatch.setattr(TrainingLoop, "_count", send)


def test_the_uninterrupted_run_has_the_steps_this_file_counts_on(straight_run):
    records = read_steps(straight_run)
    assert list(records) == list(range(NUM_STEPS))
    assert [record["epoch"] for record in records.values()] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_crash_after_any_step_changes_nothing(
    step, store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    """RC-04, RC-05, RC-07: with every epoch boundary among the steps."""
    with monkeypatch.context() as patch:
        kill_after(patch, step)
        with pytest.raises(Killed):
            run_training(make_config(), [store_dir], tmp_path / "run")
    run_training(make_config(), [store_dir], tmp_path / "run", resume=True)
    assert end_state(tmp_path / "run") == end_state(straight_run)


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_signal_at_any_step_saves_it_and_the_resumed_run_ends_the_same(
    step, store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        signal_at(patch, step)
        with pytest.raises(Interrupted) as stop:
            run_training(make_config(), [store_dir], tmp_path / "run")
    assert stop.value.signum == signal.SIGTERM
    assert find_checkpoint(tmp_path / "run", "latest")[1].step == step + 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run_training(make_config(), [store_dir], tmp_path / "run", resume=True)
    assert end_state(tmp_path / "run") == end_state(straight_run)


def test_a_signal_during_an_evaluation_gives_it_up_and_the_resumed_run_makes_it(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    measure = Learner.measure

    def send(self, batch, row):
        measure(self, batch, row)
        if self.optimizer.num_updates == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "measure", send)
        with pytest.raises(Interrupted) as stop:
            run_training(make_config(), [store_dir], tmp_path / "run")
    assert stop.value.signum == signal.SIGINT
    assert list(read_evaluations(tmp_path / "run")) == [0]
    run_training(make_config(), [store_dir], tmp_path / "run", resume=True)
    assert end_state(tmp_path / "run") == end_state(straight_run)
    assert find_checkpoint(tmp_path / "run", "best")[1].step == find_checkpoint(straight_run, "best")[1].step


def test_muon_averages_and_wsd_are_the_same_after_a_crash_and_a_signal(
    store_dir, make_config, end_state, tmp_path, monkeypatch
):
    config = make_config(
        optimizer__name="muon", optimizer__ema_decay=0.7, optimizer__lr_scheduler_type="wsd", checkpoint__save_steps=1
    )
    run_training(config, [store_dir], tmp_path / "straight")
    for stop, step in ((signal_at, 1), (kill_after, 3)):
        with monkeypatch.context() as patch:
            stop(patch, step)
            with pytest.raises((Killed, Interrupted)):
                run_training(config, [store_dir], tmp_path / "run", resume=True)
    run_training(config, [store_dir], tmp_path / "run", resume=True)
    assert end_state(tmp_path / "run") == end_state(tmp_path / "straight")


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_and_nothing_else(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch, capsys
):
    """RC-02."""
    write = saver.write_checkpoint

    def fail_once(run_dir, snapshot):
        if snapshot.state.step == 4:
            raise OSError(28, "No space left on device")
        return write(run_dir, snapshot)

    monkeypatch.setattr(saver, "write_checkpoint", fail_once)
    run_training(make_config(), [store_dir], tmp_path / "run")
    assert "checkpoint of step 4 could not be written" in capsys.readouterr().err
    assert end_state(tmp_path / "run") == end_state(straight_run)


def test_stops_and_crashes_in_a_row_change_nothing(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    """RC-04: several resumes inside one epoch, and a crash on the first step after a resume."""
    run_dir = tmp_path / "run"
    for stop, step in ((kill_after, 0), (signal_at, 0), (kill_after, 1), (signal_at, 2), (signal_at, 3)):
        with monkeypatch.context() as patch:
            stop(patch, step)
            with pytest.raises((Killed, Interrupted)):
                run_training(make_config(), [store_dir], run_dir, resume=True)
    run_training(make_config(), [store_dir], run_dir, resume=True)
    assert end_state(run_dir) == end_state(straight_run)
    attempts = read_card(run_dir).attempts
    assert [attempt.attempt for attempt in attempts] == [0, 1, 2, 3, 4, 5]
    assert [attempt.from_step for attempt in attempts] == [0, 0, 1, 1, 3, 4]
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["step"]) for line in lines] == [
        (0, 0), (1, 0), (2, 1), (3, 1), (3, 2), (4, 3), (5, 4), (5, 5),
    ]  # fmt: skip


def test_a_crash_while_a_checkpoint_is_written_changes_nothing(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    """RC-01: half a checkpoint under its temporary name."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            run_training(make_config(), [store_dir], run_dir)
    checkpoint_dir(run_dir, 4).rename(run_dir / "checkpoints" / ".unfinished-step-0000004")
    run_training(make_config(), [store_dir], run_dir, resume=True)
    assert end_state(run_dir) == end_state(straight_run)
    assert not list(run_dir.glob("checkpoints/.*"))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            run_training(make_config(), [store_dir], run_dir)
    os.truncate(checkpoint_dir(run_dir, 4) / "optimizer.safetensors", 100)
    run_training(make_config(), [store_dir], run_dir, resume=True)
    assert "passed over: " in capsys.readouterr().err
    assert end_state(run_dir) == end_state(straight_run)


def test_the_best_checkpoint_is_remembered_over_a_resume(store_dir, make_config, straight_run, tmp_path, monkeypatch):
    """RC-10."""
    run_dir = tmp_path / "run"
    config = make_config(evaluation__eval_steps=1, checkpoint__save_total_limit=1)
    losses = iter([9.0, 5.0, 2.0, 3.0, 4.0, 2.5, 7.0, 8.0])

    def fake(requests, table, *, step, attempt, seconds):
        record = real(requests, table, step=step, attempt=attempt, seconds=seconds)
        return record.model_copy(update={"loss": next(losses)})

    from dflash_tools.train import loop

    real = loop.make_evaluation_record
    monkeypatch.setattr(loop, "make_evaluation_record", fake)
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        with pytest.raises(Interrupted):
            run_training(config, [store_dir], run_dir)
    run_training(config, [store_dir], run_dir, resume=True)
    folder, state = find_checkpoint(run_dir, "best")
    assert (state.step, folder) == (2, checkpoint_dir(run_dir, 2))
    assert list(list_checkpoints(run_dir)) == [2, 6]


def test_a_used_folder_is_refused_without_resume(store_dir, make_config, straight_run, tmp_path):
    with pytest.raises(ResumeError, match="is not empty; add --resume"):
        run_training(make_config(), [store_dir], straight_run)
    with pytest.raises(ResumeError, match="is not empty"):
        run_training(make_config(), [store_dir], store_dir)


def test_resume_in_a_new_folder_starts_at_step_0(store_dir, make_config, straight_run, end_state, tmp_path):
    run_training(make_config(), [store_dir], tmp_path / "run", resume=True)
    assert end_state(tmp_path / "run") == end_state(straight_run)


def test_a_finished_run_resumed_does_nothing_and_says_the_same(store_dir, make_config, tmp_path):
    run_dir = tmp_path / "run"
    first = run_training(make_config(), [store_dir], run_dir)
    files = {path: path.read_bytes() for path in run_dir.glob("checkpoints/*/*")}
    again = run_training(make_config(), [store_dir], run_dir, resume=True)
    assert again == first
    assert {path: path.read_bytes() for path in run_dir.glob("checkpoints/*/*")} == files


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate = 0.01 there, 0.5 now"),
        ({"loss__num_anchors": 4}, "loss.num_anchors = 8 there, 4 now"),
        ({"evaluation__num_anchors": 4}, "evaluation.num_anchors = 8 there, 4 now"),
        ({"evaluation__max_samples": 1}, "evaluation.max_samples = None there, 1 now"),
        ({"plan__seed": 1}, "plan.seed = 0 there, 1 now"),
        ({"plan__batches_per_step": 1}, "plan.batches_per_step = 2 there, 1 now"),
        ({"drafter__block_size": 5}, "drafter.block_size = 4 there, 5 now"),
        ({"hardware__threads": 2}, "hardware.threads = 1 there, 2 now"),
        ({"hardware__autocast": "none"}, "hardware.autocast = bfloat16 there, none now"),
    ],
)
def test_another_run_is_refused_and_the_differing_field_named(override, named, store_dir, make_config, straight_run):
    with pytest.raises(ResumeError) as refusal:
        run_training(make_config(**override), [store_dir], straight_run, resume=True)
    assert named in str(refusal.value)
    assert "a new run folder" in str(refusal.value)


def test_settings_that_do_not_touch_the_numbers_may_change(
    store_dir, make_config, straight_run, end_state, tmp_path, monkeypatch
):
    """RC-13: also the depth of reading ahead."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, 2)
        with pytest.raises(Interrupted):
            run_training(make_config(), [store_dir], run_dir)
    changed = make_config(checkpoint__save_steps=5, hardware__threads="auto", hardware__prefetch_bytes=1)
    run_training(changed, [store_dir], run_dir, resume=True)
    assert end_state(run_dir)["tensors"] == end_state(straight_run)["tensors"]
    assert read_card(run_dir).attempts[-1].threads == 1


def test_another_store_is_refused(make_config, straight_run, tmp_path):
    other = make_store(tmp_path / "other", validation_rows=(1, 5), seed=3)
    with pytest.raises(ResumeError, match=r"stores [0-9a-f]{12} \(from .*\) there, [0-9a-f]{12} now"):
        run_training(make_config(), [other], straight_run, resume=True)


def test_a_changed_plan_file_is_refused(store_dir, make_config, tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_training(make_config(plan__max_steps=2), [store_dir], run_dir)
    run_training(make_config(plan__max_steps=2, plan__seed=4), [store_dir], other)
    (other / "plan.parquet").replace(run_dir / "plan.parquet")
    with pytest.raises(ResumeError, match=r"which plan.parquet is not.*restore the original plan.parquet"):
        run_training(make_config(plan__max_steps=2), [store_dir], run_dir, resume=True)


def test_a_finished_run_can_be_extended_and_its_steps_stay(store_dir, make_config, straight_run, tmp_path, monkeypatch):
    """More epochs: the steps that are done are those of the longer plan, and the rate is the longer schedule's."""
    run_dir = tmp_path / "run"
    run_training(make_config(plan__num_epochs=2), [store_dir], run_dir)
    done = read_steps(run_dir)
    with monkeypatch.context() as patch:
        kill_after(patch, 4)  # between the new plan file and the first checkpoint under it
        with pytest.raises(Killed):
            run_training(make_config(checkpoint__save_steps=9), [store_dir], run_dir, resume=True)
    summary = run_training(make_config(), [store_dir], run_dir, resume=True)
    assert summary["steps"] == NUM_STEPS
    longer, straight = read_steps(run_dir), read_steps(straight_run)
    for step in range(NUM_STEPS):
        rows = [(b["batch"], b["num_tokens"], b["num_anchors"]) for b in longer[step]["batches"]]
        assert rows == [(b["batch"], b["num_tokens"], b["num_anchors"]) for b in straight[step]["batches"]]
    assert longer[0] == done[0]
    assert longer[5]["learning_rate"] == straight[5]["learning_rate"]
    with pytest.raises(ResumeError, match="6 steps are done, but the plan now ends after 2"):
        run_training(make_config(plan__num_epochs=1), [store_dir], run_dir, resume=True)


def write_config(config, path):
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    return path


PROGRAM = """
import os, signal, sys
from pathlib import Path
from dflash_tools.config import TrainConfig, load_config
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.run import run_training
show = TrainProgress.show_step
def die(self, record):
    show(self, record)
    if record.step == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
TrainProgress.show_step = die
run_training(load_config(Path(sys.argv[1]), TrainConfig), [Path(sys.argv[2])], Path(sys.argv[3]), resume=True)
"""


@pytest.mark.slow
def test_kill_9_at_every_step_in_turn_ends_the_same(store_dir, make_config, straight_run, end_state, tmp_path):
    """Every attempt is a process killed at its first, second or third step; the last one finishes."""
    config, run_dir = write_config(make_config(), tmp_path / "train.toml"), tmp_path / "run"
    for step in (0, 1, 2, 3, 4, 5, NUM_STEPS):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(config), str(store_dir), str(run_dir), str(step)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == (-signal.SIGKILL if step < NUM_STEPS else 0), result.stderr
    assert end_state(run_dir) == end_state(straight_run)
    assert Path(run_dir / "log.jsonl").read_text().endswith("\n")


@pytest.mark.slow
def test_sigterm_to_the_command_saves_and_exits_143(store_dir, make_config, tmp_path):
    config = write_config(make_config(plan__num_epochs=500), tmp_path / "train.toml")
    command = ["train", str(config), "--store", str(store_dir), "--run", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "dflash_tools", *command], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or not log.stat().st_size:  # until the first step is done
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    steps = read_steps(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run", "latest")[1].step == len(steps)
