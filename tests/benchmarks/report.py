"""How long a report takes on a run of 300 thousand batches, and how much memory.

    python tests/benchmarks/report.py [--num-batches 300000] [--repeats 3]

Each repetition is a process of its own, so that the peak of its memory is its own too.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "report")]

BATCHES_PER_STEP = 8


def write_run(folder: Path, num_batches: int) -> None:
    """Make an index, a plan and a log of about this many batches, as a run of one epoch would have left them."""
    from made import make_index_store, make_run

    from dflash_tools.config import PlanSettings, TrainConfig

    # About 5.3 samples of the log-normal mix fill a batch of 8,192 padded tokens.
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(800), 1.0, int(num_batches * 5.28)), 16, 8192)
    store = make_index_store(folder / "store", lengths.astype(np.int32))
    config = TrainConfig(
        plan=PlanSettings(token_budget=8192, batches_per_step=BATCHES_PER_STEP, num_epochs=1, strategy="shuffle")
    )
    # A jump of the loss every 5,000 batches, so that the part about resets has work too.
    make_run(
        folder / "run",
        store,
        config,
        fault=lambda batches: np.where(np.arange(len(batches)) % 5000 >= 4968, 0.8, 0.0),
        held_out=np.linspace(6, 3, 100).tolist(),
    )


def measure(run: Path, out: Path) -> dict[str, float]:
    """Report once, in this process."""
    started = time.perf_counter()
    from dflash_tools.report import report_run

    report = report_run(run)
    reported = time.perf_counter()
    from dflash_tools.report import write_report

    write_report(report, out)
    written = time.perf_counter()
    if {"torch", "zarr"} & set(sys.modules):
        raise AssertionError("a report needs neither torch nor zarr")
    return {
        "num_batches": report.figures["num_batches"],
        "num_resets": report.figures["resets"],
        "report_seconds": reported - started,
        "write_seconds": written - reported,
        "total_seconds": written - started,
        "cpu_seconds": time.process_time(),
        "peak_bytes": peak_bytes(),
        "html_bytes": (out / "report.html").stat().st_size,
    }


def peak_bytes() -> int:
    """Most memory this process has held; unlike ru_maxrss it does not start at what its parent held."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main() -> None:
    """Make the run, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-batches", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="keep the made run here")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure / "run", arguments.measure / "out")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "run").is_dir():
            write_run(folder, arguments.num_batches)
        print(f"log.jsonl: {(folder / 'run' / 'log.jsonl').stat().st_size / 1e6:.0f} MB")
        results = [
            json.loads(subprocess.check_output([sys.executable, __file__, "--measure", str(folder)]))
            for _ in range(arguments.repeats)
        ]
    for key in results[0]:
        values = sorted(result[key] for result in results)
        print(f"{key:16} min {values[0]:,.2f}  median {values[len(values) // 2]:,.2f}  max {values[-1]:,.2f}")


if __name__ == "__main__":
    main()
