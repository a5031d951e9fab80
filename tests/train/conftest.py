"""A made store, a tiny drafter and runs on them."""

import json

import pytest
from make_store import make_store
from safetensors.torch import load_file

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.run_folder import newest_checkpoint
from dflash_tools.train.run import run_training
from dflash_tools.train.world import Threads


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    with Threads(1):
        yield


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("made") / "store", validation_rows=(1, 5))


@pytest.fixture(scope="session")
def make_config():
    def make(**overrides):
        tables = {
            "drafter": {"num_hidden_layers": 1, "block_size": 4},
            "plan": {"token_budget": 128, "max_batch_size": 4, "batches_per_step": 2, "num_epochs": 3},
            "loss": {"num_anchors": 8},
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"save_steps": 2, "save_total_limit": 2},
            "evaluation": {"eval_steps": 3, "num_anchors": 8},
            "hardware": {"threads": 1},
        }
        for key, value in overrides.items():
            table, _, name = key.partition("__")
            tables[table][name] = value
        return TrainConfig.model_validate(tables)

    return make


@pytest.fixture(scope="session")
def straight_run(store_dir, make_config, tmp_path_factory):
    """An uninterrupted run that others are compared with."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run_training(make_config(), [store_dir], run_dir)
    return run_dir


@pytest.fixture(scope="session")
def end_state():
    return read_end_state


def read_end_state(run_dir):
    """Everything that must not depend on kills: weights, moments, state, log and evaluations; no times or attempts."""
    checkpoint, state, _ = newest_checkpoint(run_dir)
    tensors = {
        f"{part}/{name}": (str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes())
        for part in ("drafter", "optimizer")
        for name, tensor in load_file(checkpoint / f"{part}.safetensors").items()
    }
    return {
        "tensors": tensors,
        "state": {k: v for k, v in state.model_dump().items() if k != "attempt"},
        "log": _newest(run_dir / "log.jsonl", state.step - 1),
        "evaluations": _newest(run_dir / "evaluation.jsonl", state.step),
    }


def _newest(path, last_step):
    times = {
        "attempt", "tokens_per_second", "data_wait_seconds", "compute_seconds", "checkpoint_seconds", "finished_at",
        "seconds",
    }  # fmt: skip
    records = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        records[record["step"]] = {key: value for key, value in record.items() if key not in times}
    return {step: records[step] for step in sorted(records) if step <= last_step}
