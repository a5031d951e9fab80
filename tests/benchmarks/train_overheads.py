"""What a run costs besides its steps: the wait for the first step, and the stall of a checkpoint; one JSON.

    python tests/benchmarks/train_overheads.py [--repetitions 3] [--threads 2]

First step: seconds from the start of the process to the end of step 0, less that step's own time, on stores of few and
of many samples, beside a process that only imports torch. Held-out evaluation is left out: there is nothing held out.
Checkpoints: a drafter of SmolLM2's size is trained for some steps with and without checkpoints. A stall is what a step
was held up for; it holds the copy of all state, which is also timed alone. The rest is written by a thread.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w
import torch

from dflash_tools.config import TrainConfig
from dflash_tools.train.checkpoint import take_snapshot
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_steps
from dflash_tools.train.setup import make_learner, make_setup, make_state
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_store import make_store

SAVE_STEPS = 4


def seconds_to_first_step(store: Path, folder: Path, repetition: int, threads: int) -> float:
    run_dir, toml = folder / f"{store.name}-{repetition}", folder / "train.toml"
    config = {
        "drafter": {"num_hidden_layers": 1, "block_size": 4},
        "plan": {"num_epochs": 1, "max_steps": 1},
        "hardware": {"device": "cpu", "threads": threads},
    }
    toml.write_text(tomli_w.dumps(config))
    command = [sys.executable, "-m", "dflash_tools", "train", str(toml), "--store", str(store), "--run", str(run_dir)]
    started = time.time()
    subprocess.run(command, check=True, capture_output=True)
    record = read_steps(run_dir)[0]
    return record["finished_at"] - record["compute_seconds"] - started


def seconds_to_import_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def measure_first_step(folder: Path, repetitions: int, threads: int) -> dict[str, object]:
    few = make_store(folder / "few", [8] * 100)
    many = make_store(folder / "many", [8] * 20_000, forward_token_budget=8192)
    stores = {"100_samples": few, "20000_samples": many}
    seconds: dict[str, list[float]] = {"import_torch": []} | {name: [] for name in stores}
    for repetition in range(repetitions):
        seconds["import_torch"].append(seconds_to_import_torch())
        for name, store in stores.items():
            seconds[name].append(seconds_to_first_step(store, folder, repetition, threads))
    return {name: spread(values) for name, values in seconds.items()}


def measure_checkpoints(folder: Path, num_steps: int, threads: int) -> dict[str, object]:
    store = make_store(
        folder / "wide", [430] * 16, hidden_size=576, num_layers=5, vocab_size=49_152, forward_token_budget=4096
    )

    def config(save_steps: int) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "drafter": {"num_hidden_layers": 5, "block_size": 8},
                "plan": {"max_batch_size": 2, "batches_per_step": 1, "num_epochs": 100, "max_steps": num_steps},
                "loss": {"num_anchors": 64},
                "checkpoint": {"save_steps": save_steps, "save_total_limit": 1},
                "hardware": {"device": "cpu", "threads": threads},
            }
        )

    steps: dict[str, list[dict[str, float]]] = {}
    for name, save_steps in (("without", 10**6), ("with", SAVE_STEPS)):
        run_training(config(save_steps), [store], folder / name)
        steps[name] = list(read_steps(folder / name).values())
    setup = make_setup(config(SAVE_STEPS), open_samples([store]), torch.device("cpu"), OneProcess(), None, folder)
    learner = make_learner(setup)
    copies = []
    for _ in range(5):
        started = time.perf_counter()
        snapshot = take_snapshot(make_state(setup, 0), *learner.tensors())
        copies.append(time.perf_counter() - started)
    stalls = [record["checkpoint_seconds"] for record in steps["with"] if record["checkpoint_seconds"] > 0]
    step_seconds = statistics.median(record["compute_seconds"] for record in steps["without"])
    beyond = statistics.median(stalls) - statistics.median(copies)
    return {
        "num_parameters": learner.num_parameters,
        "checkpoint_bytes": snapshot.num_bytes,
        "checkpoints": len(stalls),
        "step_seconds_without_checkpoints": spread([record["compute_seconds"] for record in steps["without"]]),
        "step_seconds_with_checkpoints": spread([record["compute_seconds"] for record in steps["with"]]),
        "copy_seconds": spread(copies),
        "stall_seconds": spread(stalls),
        "stall_beyond_the_copy_share_of_a_step": beyond / step_seconds,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=17)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        result = {
            "machine": platform.processor() or platform.machine(),
            "threads": options.threads,
            "torch": torch.__version__,
            "seconds_before_the_first_step": measure_first_step(Path(scratch), options.repetitions, options.threads),
            "checkpoints": measure_checkpoints(Path(scratch), options.steps, options.threads),
            "load_average": os.getloadavg(),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
