"""How many processes share a run: the same batches, anchors and loss; weights within float summation."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import tomli_w
import torch

from dflash_tools.contracts.run_folder import find_checkpoint
from dflash_tools.errors import ConfigError, Interrupted
from dflash_tools.train import run as run_module
from dflash_tools.train.checkpoint import load_checkpoint
from dflash_tools.train.loop import TrainingLoop
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations, read_steps
from dflash_tools.train.world import choose_device, choose_threads

LOSS_BOUND = 1e-6
"""Relative difference of a step's loss between world sizes in float32: only the order of additions differs."""

WEIGHT_BOUND = 1e-5
"""Difference of a weight after six updates at a rate of 1e-2 (found: 1.7e-7)."""

MUON_BOUND = 5e-4
"""The same under Muon after four updates at 1e-3 (found: 3e-5 and 1.8e-4): rounding to bfloat16 inside each
orthogonalisation turns 1e-7 into whole steps of 0.4 %, and four updates add up."""


class ThreadWorld:
    """Ranks as threads of one process."""

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier

    def sum_in_place(self, tensor):
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait()
        total = self._slots[0].clone()
        for other in self._slots[1:]:
            total += other
        self._barrier.wait()
        tensor.copy_(total)

    def copy_from_first(self, tensor):
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(self._slots[0])
        self._barrier.wait()

    def close(self):
        pass


def run_as_ranks(size, monkeypatch, *arguments, **options):
    """Run ``run_training`` in ``size`` threads that form a world; returns what each returned or raised."""
    slots, barrier = [None] * size, threading.Barrier(size, timeout=60)
    results = [None] * size
    local = threading.local()
    monkeypatch.setattr(run_module, "join_world", lambda device: ThreadWorld(local.rank, size, slots, barrier))

    def work(rank):
        local.rank = rank
        try:
            results[rank] = run_training(*arguments, **options)
        except (Interrupted, AssertionError) as error:
            results[rank] = error
        except Exception as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def composition(run_dir):
    return {
        step: [{k: v for k, v in b.items() if k not in {"rank", "loss"}} for b in record["batches"]]
        for step, record in read_steps(run_dir).items()
    }


def assert_same_curve(run_dir, reference):
    assert composition(run_dir) == composition(reference)
    steps, expected = read_steps(run_dir), read_steps(reference)
    for step, record in steps.items():
        assert record["label_weight"] == expected[step]["label_weight"]
        assert record["loss"] == pytest.approx(expected[step]["loss"], rel=LOSS_BOUND)
    for step, record in read_evaluations(run_dir).items():
        assert record.loss == pytest.approx(read_evaluations(reference)[step].loss, rel=LOSS_BOUND)
        assert record.count_by_slot == read_evaluations(reference)[step].count_by_slot
    weights = load_checkpoint(find_checkpoint(run_dir, "latest")[0])[0]
    for name, tensor in load_checkpoint(find_checkpoint(reference, "latest")[0])[0].items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=WEIGHT_BOUND)


@pytest.fixture(scope="module")
def config(make_config):
    return make_config(plan__batches_per_step=4, plan__max_batch_size=1, plan__max_steps=6, hardware__autocast="none")


@pytest.fixture(scope="module")
def one_process(store_dir, config, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run_training(config, [store_dir], run_dir)
    return run_dir


@pytest.mark.parametrize("size", [2, 4, 5])
def test_any_number_of_ranks_gives_the_same_curve(size, store_dir, config, one_process, tmp_path, monkeypatch):
    """Five ranks share four batches, and two the last step of an epoch: some have none and still join."""
    results = run_as_ranks(size, monkeypatch, config, [store_dir], tmp_path / "run")
    assert results[0]["steps"] == 6
    assert results[1:] == [{}] * (size - 1)
    assert_same_curve(tmp_path / "run", one_process)
    ranks = {batch["rank"] for record in read_steps(tmp_path / "run").values() for batch in record["batches"]}
    assert ranks == set(range(min(size, 4)))


def test_muon_and_averages_agree_between_one_and_two_ranks(store_dir, make_config, tmp_path, monkeypatch):
    """Muon orthogonalises in bfloat16, which rounds the differences of summation up."""
    config = make_config(
        plan__batches_per_step=4, plan__max_batch_size=1, plan__max_steps=4, hardware__autocast="none",
        optimizer__name="muon", optimizer__ema_decay=0.5,
    )  # fmt: skip
    run_training(config, [store_dir], tmp_path / "one")
    run_as_ranks(2, monkeypatch, config, [store_dir], tmp_path / "two")
    one, two = (load_checkpoint(find_checkpoint(tmp_path / name, "latest")[0]) for name in ("one", "two"))
    for found, expected in zip(two, one, strict=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=MUON_BOUND)


def test_a_run_stops_on_two_ranks_and_goes_on_with_one_and_four(store_dir, config, one_process, tmp_path, monkeypatch):
    """RC-11; a signal that one rank alone has got stops all of them at the same step."""
    count = TrainingLoop._count

    def signal_one_rank(step):
        def send(self, update):
            if self.state.step == step and self._learner.world.rank == self._learner.world.size - 1:
                self._stop.signum = signal.SIGTERM
            count(self, update)

        return send

    run_dir = tmp_path / "run"
    for size, step in ((2, 1), (1, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(TrainingLoop, "_count", signal_one_rank(step))
            results = run_as_ranks(size, patch, config, [store_dir], run_dir, resume=True)
        assert [result.signum for result in results] == [signal.SIGTERM] * size
        assert find_checkpoint(run_dir, "latest")[1].step == step + 1
    run_as_ranks(4, monkeypatch, config, [store_dir], run_dir, resume=True)
    assert_same_curve(run_dir, one_process)


def test_a_step_without_any_supervised_slot_changes_nothing_on_any_rank(store_dir, make_config, tmp_path, monkeypatch):
    """TN-01: also when only one of two ranks has nothing."""
    from dflash_tools.train import setup as setup_module

    config = make_config(plan__max_batch_size=1, plan__max_steps=3, plan__batches_per_step=2)
    real = setup_module.anchors_of_rows

    def some_without(samples, config):
        counts = real(samples, config)
        plan = setup_module.plan_training(samples, config)
        for batch in [*plan.batches_of_step(0), plan.batches_of_step(1)[0]]:
            counts[plan.rows(batch)] = 0
        return counts

    monkeypatch.setattr(setup_module, "anchors_of_rows", some_without)
    run_dir = tmp_path / "run"
    results = run_as_ranks(2, monkeypatch, config, [store_dir], run_dir)
    assert results[0]["steps"] == 3
    records = read_steps(run_dir)
    assert (records[0]["loss"], records[0]["label_weight"], records[0]["grad_norm"]) == (0.0, 0.0, 0.0)
    assert not records[0]["skipped"]
    assert records[1]["batches"][0]["num_anchors"] == 0
    assert records[1]["loss"] > 0
    drafter, optimizer = load_checkpoint(find_checkpoint(run_dir, "latest")[0])
    assert all(torch.isfinite(tensor).all() for tensor in drafter.values())
    assert optimizer["step.fc.weight"] == 2


def test_threads_default_to_the_cores_and_to_one_under_torchrun(monkeypatch):
    assert choose_threads(3) == 3
    assert choose_threads("auto") == len(os.sched_getaffinity(0))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_threads("auto") == 1


def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="this machine has no CUDA device; use auto or cpu"):
        choose_device("cuda:1")
    with pytest.raises(ConfigError, match="is not a device; use auto, cpu"):
        choose_device("gpu")


PROGRAM = """
import os, signal, sys
from pathlib import Path
from dflash_tools.config import TrainConfig, load_config
from dflash_tools.train.loop import TrainingLoop
from dflash_tools.train.run import run_training
count = TrainingLoop._count
def send(self, update):
    if self.state.step == int(sys.argv[4]) and self._learner.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    count(self, update)
TrainingLoop._count = send
run_training(load_config(Path(sys.argv[1]), TrainConfig), [Path(sys.argv[2])], Path(sys.argv[3]))
"""


def torchrun(size, *arguments):
    # Behind "--": torchrun would take --run for an option of its own.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_torchrun_with_gloo_gives_the_same_curve_and_goes_on_with_another_size(
    store_dir, config, one_process, tmp_path
):
    toml, program, run_dir = tmp_path / "train.toml", tmp_path / "program.py", tmp_path / "run"
    toml.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    program.write_text(PROGRAM)
    train = ("-m", "--", "dflash_tools", "train", toml, "--store", store_dir)
    whole = torchrun(2, *train, "--run", tmp_path / "run2", "--json")
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)["steps"] == 6
    assert_same_curve(tmp_path / "run2", one_process)
    stopped = torchrun(2, "--", program, toml, store_dir, run_dir, 2)
    assert stopped.returncode != 0
    assert find_checkpoint(run_dir, "latest")[1].step == 3, stopped.stderr
    resumed = torchrun(4, *train, "--run", run_dir, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_curve(run_dir, one_process)
