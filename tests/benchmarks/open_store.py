"""Cost of opening a store by the number of samples: a synthetic index, no states; one JSON.

    python tests/benchmarks/open_store.py [--samples N ...]

Each size is opened in a fresh process, which reports wall seconds of ``open_store`` and of the imports, and how much
its largest resident size grew.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.store import open_store
from dflash_tools.store.index import INDEX_SCHEMA, write_index
from dflash_tools.store.layout import build_layout
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.writer import StoreWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_store

EDGES = (770, 1216, 1728, 2432, 3296, 8192)
BYTES_PER_TOKEN = 40_960  # an 8B target

OPEN = """
import json, sys, time
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
start = time.perf_counter()
from dflash_tools.store import open_store
imported = time.perf_counter()
before = peak()
opened = time.perf_counter()
store = open_store(sys.argv[1])
store.index["num_tokens"].sum()
done = time.perf_counter()
print(json.dumps({"open_seconds": round(done - opened, 3), "import_seconds": round(imported - start, 3),
                  "grown_bytes": peak() - before}))
"""


class _NoShards(StoreWriter):
    """Finishes a store that has an index and no shard, as only this benchmark may."""

    def shards(self) -> list[tuple[int, int]]:
        return []


def make_synthetic(folder: Path, num_samples: int) -> tuple[Path, int]:
    """A store of chats of about 2 thousand tokens without its states. Returns its folder and number of shards."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(7.3, 0.7, num_samples), 16, 8192).astype(np.int32)
    bucket_ids = np.searchsorted(EDGES, lengths).astype(np.int32)
    layout = build_layout(
        lengths, bucket_ids, EDGES, bytes_per_token=BYTES_PER_TOKEN, codec="none", forward_token_budget=16384
    )
    small = open_store(make_store.make_store(folder / "small", target=False))
    path = folder / str(num_samples)
    path.mkdir()
    ids = [generator.bytes(16).hex() for _ in range(num_samples)]
    index = pl.DataFrame(
        {
            "sample_id": ids,
            "conversation_id": [generator.bytes(16).hex() for _ in range(num_samples)],
            "source": ["chats.jsonl"] * num_samples,
            "source_row": np.arange(1, num_samples + 1),
            "split": ["train"] * num_samples,
            "bucket_id": bucket_ids,
            "shard_id": layout.shard_ids,
            "forward_id": layout.forward_ids,
            "start": layout.starts,
            "num_tokens": lengths,
            "num_supervised_tokens": lengths // 2,
            "num_valid_anchors": lengths // 2 - 1,
        },
        schema=INDEX_SCHEMA,
        strict=False,
    )[layout.row_order]
    write_index(path, index)
    manifest = small.manifest.model_copy(
        update={"buckets": layout.buckets, "num_samples": num_samples, "num_tokens": int(lengths.sum())}
    )
    _NoShards(path, make_store.StoreShape(num_layers=5, hidden_size=4096), layout.buckets).finish(manifest)
    assert (path / MANIFEST_NAME).is_file()
    return path, sum(bucket.num_shards for bucket in layout.buckets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 200_000, 1_000_000])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="open-store-"))
    sizes = {}
    try:
        for num_samples in arguments.samples:
            path, num_shards = make_synthetic(folder, num_samples)
            runs = [
                json.loads(subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, check=True).stdout)
                for _ in range(arguments.repetitions)
            ]
            sizes[num_samples] = {
                "num_shards": num_shards,
                "index_bytes": (path / "index.parquet").stat().st_size,
                "open_seconds": sorted(run["open_seconds"] for run in runs),
                "import_seconds": sorted(run["import_seconds"] for run in runs),
                "grown_bytes": max(run["grown_bytes"] for run in runs),
            }
    finally:
        shutil.rmtree(folder)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "polars": pl.__version__}
    print(json.dumps({"benchmark": "open_store", "machine": machine, "by_num_samples": sizes}))


if __name__ == "__main__":
    main()
