"""Write rate of whole shards beside a raw file, per-sample safetensors and stock zarr; one JSON.

    python tests/benchmarks/write_store.py [--repetitions N] [--dir DIR]

Each turn writes the same samples (5 x 4,096 values a token) and ends on disk (fsync): the raw file in one call, the
store with checks, checksums, renames and commit record. A ratio is the median over repetitions of the ratio within
one repetition. ``amplification`` is bytes handed to the kernel over useful bytes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import zarr
from safetensors.torch import save_file

from dflash_tools.store import open_store
from dflash_tools.store.arrays import shape_of
from dflash_tools.store.bf16 import to_bf16_bits
from dflash_tools.store.writer import StoreWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_store

NUM_LAYERS, HIDDEN_SIZE = 5, 4096


class Case:
    """One shard's samples and the places they are written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lengths = [int(n) for n in np.random.default_rng(0).integers(150, 900, 6)]
        make_store.make_states = lambda i, length, *_: to_bf16_bits(
            np.random.default_rng(i).standard_normal((length, NUM_LAYERS, HIDDEN_SIZE), dtype=np.float32)
        )
        self.writers = {}
        for codec in ("none", "lossless"):
            path = make_store.make_store(
                folder / codec,
                lengths,
                edges=[1000],
                hidden_size=HIDDEN_SIZE,
                num_layers=NUM_LAYERS,
                codec=codec,
                target=False,
                shard_bytes=1 << 30,
            )
            store = open_store(path)
            self.writers[codec] = StoreWriter(path, shape_of(store.manifest), store.manifest.buckets)
            self.samples = [sample.hidden_states for sample in store.read(range(len(store)))]
            assert len(self.writers[codec].shards()) == 1
        self.raw = np.concatenate(self.samples)
        bucket = self.writers["none"].buckets[0]
        self.zarr = zarr.create_array(
            folder / "zarr",
            shape=(bucket.axis_tokens, NUM_LAYERS, HIDDEN_SIZE),
            shards=(bucket.shard_tokens, NUM_LAYERS, HIDDEN_SIZE),
            chunks=(bucket.chunk_tokens, NUM_LAYERS, HIDDEN_SIZE),
            dtype="uint16",
            compressors=None,
        )
        self.starts = self.writers["none"].samples_of(0, 0)["start"].to_list()

    @property
    def num_bytes(self) -> int:
        """Useful bytes of a turn."""
        return self.raw.nbytes

    def clear(self) -> None:
        """Remove what earlier turns wrote, so that each writes new files, as an extraction does."""
        for pattern in ("raw.bin", "*.safetensors", "zarr/c/**/0", "*/shards/*.json", "*/buckets/0/hidden_states/c.*"):
            for path in self.folder.glob(pattern):
                if path.is_file():
                    path.unlink()

    def write_raw(self) -> None:
        with (self.folder / "raw.bin").open("wb", buffering=0) as file:
            view = memoryview(self.raw.reshape(-1).view(np.uint8))
            while len(view):
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def write_safetensors(self) -> None:
        for i, states in enumerate(self.samples):
            path = self.folder / f"{i}.safetensors"
            save_file({"hidden_states": torch.from_numpy(states)}, path)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def write_zarr(self) -> None:
        whole = np.zeros(self.zarr.shape, dtype=np.uint16)
        for start, states in zip(self.starts, self.samples, strict=True):
            whole[start : start + len(states)] = states
        self.zarr[:] = whole
        os.sync()

    def write_store(self, codec: str) -> None:
        self.writers[codec].write_shard(0, 0, self.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made; default the temp folder")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="write-store-", dir=arguments.dir))
    try:
        case = Case(folder)
        turns = {
            "raw": case.write_raw,
            "none": lambda: case.write_store("none"),
            "lossless": lambda: case.write_store("lossless"),
            "safetensors": case.write_safetensors,
            "zarr": case.write_zarr,
        }
        names = list(turns)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        generator = np.random.default_rng(0)
        for _ in range(arguments.repetitions):
            for name in generator.permutation(names):
                case.clear()
                os.sync()
                wall, cpu = time.perf_counter(), time.process_time()
                turns[name]()
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        for codec in ("none", "lossless"):
            case.write_store(codec)
        stored = sum(p.stat().st_size for p in (folder / "none" / "buckets").rglob("c.*"))
        compressed = sum(p.stat().st_size for p in (folder / "lossless" / "buckets").rglob("c.*"))
    finally:
        shutil.rmtree(folder)
    rates = {name: sorted(case.num_bytes / wall / 1e6 for wall, _ in turn) for name, turn in seconds.items()}
    result = {
        "benchmark": "write_store",
        "repetitions": arguments.repetitions,
        "useful_bytes": case.num_bytes,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
        "writers": {
            name: {
                "mb_per_second": {
                    "min": round(rate[0]),
                    "median": round(statistics.median(rate)),
                    "max": round(rate[-1]),
                },
                "cpu_seconds_per_gb": round(
                    statistics.median(cpu for _, cpu in seconds[name]) / case.num_bytes * 1e9, 3
                ),
            }
            for name, rate in rates.items()
        },
        "ratios_to_raw": {
            name: round(
                statistics.median(raw[0] / other[0] for raw, other in zip(seconds["raw"], turn, strict=True)), 3
            )
            for name, turn in seconds.items()
        },
        "amplification": round(stored / case.num_bytes, 4),
        "lossless_ratio_of_normal_values": round(stored / compressed, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
