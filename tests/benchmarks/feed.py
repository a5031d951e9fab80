"""How fast the feed brings batches, and how long training would wait for them; one JSON.

    python tests/benchmarks/feed.py [--gigabytes N] [--folder DIR]

A made store of the shape of Qwen3-8B (5 layers x 4,096, bfloat16), lengths log-normal around 430 tokens, read in plan
order. First without any compute: that is the limit of this disk and feed, with the files in the page cache and, after
they were dropped from it, without. Then with a stub that computes for as long as a drafter would that takes a given
share of that rate: the share of time spent waiting for data is what a step would lose.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dflash_tools.config import PlanSettings, TrainConfig
from dflash_tools.train.batch import Batch, BatchReader, BatchRequest
from dflash_tools.train.feed import NUM_READERS, Feed
from dflash_tools.train.setup import make_setup, make_work
from dflash_tools.train.stores import open_samples
from dflash_tools.train.work import Work
from dflash_tools.train.world import OneProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_store import make_store

HIDDEN_SIZE, NUM_LAYERS = 4096, 5
TOKEN_BYTES = HIDDEN_SIZE * NUM_LAYERS * 2
PREFETCH_BYTES = 1 << 30
SHARES = (0.25, 0.5, 0.75, 0.9)


def make(folder: Path, num_bytes: int) -> Path:
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) * TOKEN_BYTES < num_bytes:
        lengths.append(int(np.clip(generator.lognormal(np.log(430), 0.8), 32, 4096)))
    store = folder / "store"
    if not (store / "manifest.json").exists():
        make_store(store, lengths, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)
    return store


def prepare(store: Path) -> Work:
    config = TrainConfig.model_validate(
        {
            "drafter": {"num_hidden_layers": 1, "head_dim": 128},
            "plan": PlanSettings(token_budget=8192, max_batch_size=16, num_epochs=1).model_dump(),
            "hardware": {"device": "cpu"},
        }
    )
    samples = open_samples([store])
    return make_work(make_setup(config, samples, torch.device("cpu"), OneProcess(), None, store))


def drop_from_cache(store: Path) -> None:
    for path in store.rglob("hidden_states/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def open_feed(work: Work) -> Feed[BatchRequest, Batch]:
    reader: BatchReader = work.reader
    requests: Iterator[BatchRequest] = work.requests(0, 0, 1)
    return Feed(requests, reader.read, num_bytes=reader.num_bytes, max_bytes=PREFETCH_BYTES)


def read_rate(store: Path, *, cold: bool) -> float:
    """Bytes per second of states, nothing computed."""
    work = prepare(store)
    if cold:
        drop_from_cache(store)
    started, num_bytes = time.perf_counter(), 0
    with open_feed(work) as feed:
        for batch in feed:
            num_bytes += int(batch.request.num_tokens.sum()) * TOKEN_BYTES
    return num_bytes / (time.perf_counter() - started)


def wait_share(store: Path, bytes_per_second: float) -> float:
    """Share of time spent waiting when compute takes states at this rate; the first batch, start-up, not counted."""
    work = prepare(store)
    with open_feed(work) as feed:
        next(feed)
        waited, started = feed.wait_seconds, time.perf_counter()
        for batch in feed:
            time.sleep(int(batch.request.num_tokens.sum()) * TOKEN_BYTES / bytes_per_second)
        return (feed.wait_seconds - waited) / (time.perf_counter() - started)


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        store = make(options.folder or Path(scratch), int(options.gigabytes * 1e9))
        rates = {
            "cold_bytes_per_second": [read_rate(store, cold=True) for _ in range(options.repetitions)],
            "warm_bytes_per_second": [read_rate(store, cold=False) for _ in range(options.repetitions)],
        }
        warm = statistics.median(rates["warm_bytes_per_second"])
        waits = {
            f"wait_share_at_{share:.0%}_of_warm_rate": [
                wait_share(store, share * warm) for _ in range(options.repetitions)
            ]
            for share in SHARES
        }
        result = {
            "machine": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "readers": NUM_READERS,
            "store_bytes": sum(path.stat().st_size for path in store.rglob("hidden_states/*")),
            "bytes_per_token": TOKEN_BYTES,
            **{name: spread(values) for name, values in (rates | waits).items()},
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
