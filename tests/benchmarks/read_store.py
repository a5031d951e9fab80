"""Read rate of a store beside a memory map, per-sample safetensors, stock zarr and bare Blosc decoding; one JSON.

    python tests/benchmarks/read_store.py [--warm | --cold] [--threads N] [--megabytes N] [--repetitions N]

Every reader brings the same samples (5 x 4,096 values a token, at least 1 MB each) in the same random order into a
buffer that is used again. A repetition runs each reader once, in random order and, warm, in turns of a few samples;
a ratio is the median over repetitions of the ratio within one repetition.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_tools.store import Store, open_store
from dflash_tools.store.arrays import CRC_BYTES
from dflash_tools.store.bf16 import to_bf16_bits
from dflash_tools.store.direct import DirectReader
from dflash_tools.store.shard import decompress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_store

NUM_LAYERS, HIDDEN_SIZE = 5, 4096
TOKEN_BYTES = NUM_LAYERS * HIDDEN_SIZE * 2
Read = Callable[[int, np.ndarray], None]


def choose_lengths(megabytes: int) -> list[int]:
    """Between 1 MB and 40 MB a sample, log-uniform."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) * TOKEN_BYTES < megabytes * 1e6:
        lengths.append(int(np.exp(generator.uniform(np.log(26), np.log(1000)))))
    return lengths


def states_of(i: int, length: int, num_layers: int, hidden_size: int, seed: int) -> np.ndarray:
    """Bits with channel scales as in models: fast to make, and no two tokens alike."""
    del num_layers, hidden_size, seed
    generator = np.random.default_rng(i)
    base = generator.standard_normal((64, NUM_LAYERS, HIDDEN_SIZE), dtype=np.float32)
    scale = generator.lognormal(0.0, 1.0, (length, NUM_LAYERS, 1)).astype(np.float32)
    return to_bf16_bits(base[np.arange(length) % 64] * scale)


class Case:
    """The same samples in every form."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        make_store.make_states = states_of
        self.lengths = choose_lengths(megabytes)
        self.stores: dict[str, Path] = {}
        for name, options in {
            "none": {"codec": "none"},
            "lossless": {"codec": "lossless"},
            "fp8": {"hidden_states_dtype": "fp8"},
        }.items():
            self.stores[name] = make_store.make_store(
                folder / name, self.lengths, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, target=False, **options
            )
        store = open_store(self.stores["none"])
        self.num_tokens = store.index["num_tokens"].to_numpy()
        self.offsets = np.concatenate([[0], np.cumsum(self.num_tokens.astype(np.int64))]) * TOKEN_BYTES
        self.raw = folder / "raw.bin"
        self.tensors = folder / "safetensors"
        self.tensors.mkdir()
        with self.raw.open("wb") as file:
            for row in range(len(store)):
                states = store.read([row])[0].hidden_states
                file.write(states.tobytes())
                save_file({"hidden_states": torch.from_numpy(states)}, self.tensors / f"{row}.safetensors")
            file.flush()
            os.fsync(file.fileno())

    @property
    def num_bytes(self) -> int:
        """Useful bytes of one pass."""
        return int(self.offsets[-1])


class Readers:
    """Ways to bring the same bytes; each method opens what it needs and gives a function (row, buffer)."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.kept: dict[str, Store] = {}
        self.raw: np.memmap | None = None
        self.starts: dict[str, Callable[[], Read]] = {
            "memmap": self.memmap,
            "none": lambda: self.stored("none", "direct"),
            "none_first_pass": self.first_pass,
            "safe_open": self.tensors,
            "zarr": lambda: self.stored("none", "zarr"),
            "lossless": lambda: self.stored("lossless", "direct"),
            "bare_blosc": self.bare_blosc,
            "fp8": lambda: self.stored("fp8", "direct"),
        }

    def unmap(self) -> None:
        """Close every map: a mapped page cannot be dropped from the cache. What was checked stays checked."""
        self.raw = None
        for store in self.kept.values():
            if isinstance(store._reader, DirectReader):
                store._reader._open.clear()

    def stored(self, name: str, reader: str) -> Read:
        key = f"{name} {reader}"
        if key not in self.kept:
            self.kept[key] = open_store(self.case.stores[name], reader=reader)
        return self.kept[key].read_into

    def first_pass(self) -> Read:
        return open_store(self.case.stores["none"]).read_into

    def memmap(self) -> Read:
        if self.raw is None:
            self.raw = np.memmap(self.case.raw, dtype=np.uint8, mode="r")
        raw = self.raw

        def read(row: int, buffer: np.ndarray) -> None:
            target = buffer.reshape(-1).view(np.uint8)
            target[:] = raw[self.case.offsets[row] : self.case.offsets[row + 1]]

        return read

    def tensors(self) -> Read:
        def read(row: int, buffer: np.ndarray) -> None:
            with safe_open(self.case.tensors / f"{row}.safetensors", framework="pt") as file:
                torch.from_numpy(buffer).copy_(file.get_tensor("hidden_states"))

        return read

    def bare_blosc(self) -> Read:
        """Decode the same chunks without a look at indexes and checksums, which are taken from the reader."""
        store = open_store(self.case.stores["lossless"])
        direct, spec = store._reader, store._specs["hidden_states"]
        assert isinstance(direct, DirectReader)
        places = store.index.select("bucket_id", "shard_id", "start").rows()

        def read(row: int, buffer: np.ndarray) -> None:
            bucket_id, shard_id, start = places[row]
            bucket = store.manifest.buckets[bucket_id]
            file = direct._file(spec, bucket_id, shard_id)
            size = bucket.chunk_tokens * TOKEN_BYTES
            target = buffer.reshape(-1).view(np.uint8)
            chunk = (start - shard_id * bucket.shard_tokens) // bucket.chunk_tokens
            for first in range(0, target.nbytes, size):
                offset = file.offsets[chunk + first // size]
                stop = offset + file.sizes[chunk + first // size] - CRC_BYTES
                piece = target[first : first + size]
                if piece.nbytes < size:
                    piece = np.empty(size, dtype=np.uint8)
                decompress(file.data[offset:stop], piece)

        return read


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run_pass(case: Case, read: Read, order: np.ndarray, threads: int) -> tuple[float, float]:
    """Wall and CPU seconds of one pass over all samples."""
    longest = int(case.num_tokens.max())
    buffers = [np.ones((longest, NUM_LAYERS, HIDDEN_SIZE), dtype=np.uint16) for _ in range(threads)]

    def work(thread: int) -> None:
        for row in order[thread::threads]:
            read(int(row), buffers[thread][: case.num_tokens[row]])

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(1, threads)]
    wall, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    work(0)
    for worker in workers:
        worker.join()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    case: Case, folder: Path, *, cold: bool, threads: int, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each reader in each repetition."""
    readers = Readers(case)
    names = list(readers.starts)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    generator = np.random.default_rng(1)
    num_samples = len(case.num_tokens)
    for name in names:  # every page mapped, every chunk checked once
        run_pass(case, readers.starts[name](), np.arange(num_samples), threads)
    for _ in range(repetitions):
        order = generator.permutation(num_samples)
        # Warm, the readers take turns every few samples, so that other work on the machine meets all alike.
        turns = [order] if cold else np.array_split(order, max(1, num_samples // (3 * threads)))
        started = {} if cold else {name: readers.starts[name]() for name in names}
        sums = {name: np.zeros(2) for name in names}
        for turn in turns:
            for name in generator.permutation(names):
                if cold:
                    readers.unmap()
                    gc.collect()
                    drop_cache(folder)
                read = readers.starts[name]() if cold else started[name]
                sums[name] += run_pass(case, read, turn, threads)
        for name in names:
            seconds[name].append((float(sums[name][0]), float(sums[name][1])))
    return seconds


def summarise(case: Case, seconds: dict[str, list[tuple[float, float]]]) -> dict:
    readers = {}
    for name, passes in seconds.items():
        rates = sorted(case.num_bytes / wall / 1e6 for wall, _ in passes)
        readers[name] = {
            "mb_per_second": {
                "min": round(rates[0]),
                "median": round(statistics.median(rates)),
                "max": round(rates[-1]),
            },
            "cpu_seconds_per_gb": round(statistics.median(cpu for _, cpu in passes) / case.num_bytes * 1e9, 3),
        }

    def ratio(reader: str, base: str) -> float:
        pairs = zip(seconds[reader], seconds[base], strict=True)
        return round(statistics.median(b[0] / r[0] for r, b in pairs), 3)

    return {
        "readers": readers,
        "ratios": {
            "none_to_memmap": ratio("none", "memmap"),
            "none_first_pass_to_memmap": ratio("none_first_pass", "memmap"),
            "none_to_safe_open": ratio("none", "safe_open"),
            "none_to_zarr": ratio("none", "zarr"),
            "lossless_to_bare_blosc": ratio("lossless", "bare_blosc"),
            "fp8_to_memmap": ratio("fp8", "memmap"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--warm", action="store_true", help="pages in the cache (default)")
    mode.add_argument("--cold", action="store_true", help="pages dropped before each pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made; default the temp folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="read-store-", dir=arguments.dir))
    try:
        case = Case(folder, arguments.megabytes)
        seconds = measure(
            case, folder, cold=arguments.cold, threads=arguments.threads, repetitions=arguments.repetitions
        )
        result = {
            "benchmark": "read_store",
            "mode": "cold" if arguments.cold else "warm",
            "threads": arguments.threads,
            "repetitions": arguments.repetitions,
            "num_samples": len(case.lengths),
            "useful_bytes": case.num_bytes,
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
            **summarise(case, seconds),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
