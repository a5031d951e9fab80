"""Tokens per second of extraction beside the bare backbone forward over the same batches; prints one JSON.

    python tests/benchmarks/extract.py [--repetitions N] [--tokens N] [--codec none|lossless] [--fp8]

The target is a random Llama of SmolLM2-135M's shape in bfloat16. A repetition runs, one after another over the same
forward batches: the bare backbone with all its layers, the bare backbone up to the last wanted layer, and extraction
(forward up to that layer, capture, encode, write with fsync, commit). A ratio is the median over repetitions of the
ratio within one repetition.
"""

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import torch

from dflash_tools.config import TargetSection
from dflash_tools.extract.forward import Forward
from dflash_tools.extract.pipeline import write_shards
from dflash_tools.extract.run import write_order
from dflash_tools.progress import Progress
from dflash_tools.store.arrays import StoreShape
from dflash_tools.store.index import INDEX_SCHEMA, write_index
from dflash_tools.store.layout import build_layout
from dflash_tools.store.writer import StoreWriter
from dflash_tools.target.capture import capture_states
from dflash_tools.target.layers import choose_layers
from dflash_tools.target.load import load_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_models

TOKEN_BUDGET = 512  # small, so that a short run has several shards


def save_target(folder: Path) -> Path:
    """Save a random Llama of SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_models.make_tiny_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_writer(store: Path, shape: StoreShape, num_tokens: int) -> StoreWriter:
    """Prepare a store of log-normal lengths with random ids, without states."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(generator.lognormal(5.5, 0.8), 16, TOKEN_BUDGET)))
    counts = np.array(lengths, dtype=np.int32)
    buckets = np.zeros(len(counts), dtype=np.int32)
    layout = build_layout(
        counts,
        buckets,
        [int(counts.max())],
        bytes_per_token=shape.bytes_per_token,
        codec=shape.codec,
        forward_token_budget=TOKEN_BUDGET,
        shard_bytes=768 * shape.bytes_per_token,
    )
    names = [f"{i:032x}" for i in range(len(counts))]
    index = pl.DataFrame(
        {
            "sample_id": names,
            "conversation_id": names,
            "source": ["random"] * len(counts),
            "source_row": np.arange(1, len(counts) + 1),
            "split": ["train"] * len(counts),
            "bucket_id": buckets,
            "shard_id": layout.shard_ids,
            "forward_id": layout.forward_ids,
            "start": layout.starts,
            "num_tokens": counts,
            "num_supervised_tokens": counts,
            "num_valid_anchors": counts - 1,
        },
        schema_overrides=INDEX_SCHEMA,
    )[layout.row_order]
    store.mkdir()
    write_index(store, index)
    writer = StoreWriter(store, shape, layout.buckets)
    writer.create_arrays()
    for key in writer.shards():
        ids = [generator.integers(300, 40_000, n, dtype=np.int32) for n in writer.samples_of(*key)["num_tokens"]]
        writer.write_tokens(*key, ids, [np.ones(len(row), dtype=np.uint8) for row in ids])
    return writer


def padded_batches(writer: StoreWriter) -> list[torch.Tensor]:
    """The forward batches of all shards, in the order in which extraction runs them."""
    batches = []
    for key in write_order(writer):
        ids = [row for row, _ in writer.read_tokens(*key)]
        forward_ids = writer.samples_of(*key)["forward_id"].to_numpy()
        for forward_id in np.unique(forward_ids):
            rows = [torch.from_numpy(ids[i].astype(np.int64)) for i in np.flatnonzero(forward_ids == forward_id)]
            batches.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    return batches


def seconds_of(action) -> float:
    """Time one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--codec", choices=["none", "lossless"], default="none")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix="extract-benchmark-"))
    try:
        target = load_target(TargetSection(model=str(save_target(folder / "target")), device="cpu"))
        layer_ids = choose_layers("auto", 5, 30)
        shape = StoreShape(
            num_layers=5,
            hidden_size=576,
            codec=options.codec,
            hidden_states_dtype="fp8" if options.fp8 else "bfloat16",
        )
        writer = make_writer(folder / "store", shape, options.tokens)
        batches, shards = padded_batches(writer), write_order(writer)
        num_tokens = int(writer.index["num_tokens"].sum())

        @torch.inference_mode()
        def bare() -> None:
            for ids_BT in batches:
                target.backbone(input_ids=ids_BT, use_cache=False)

        def bare_to_last_wanted() -> None:
            for ids_BT in batches:
                capture_states(target, ids_BT, layer_ids[-1:])

        def extraction() -> None:
            for path in (writer.store / "shards").iterdir():
                path.unlink()
            with Progress("extract", num_tokens, "tokens", silent=True) as progress:
                write_shards(writer, Forward(target=target, layer_ids=layer_ids), shards, progress)

        actions = {"bare": bare, "bare_to_last_wanted_layer": bare_to_last_wanted, "extraction": extraction}
        for action in actions.values():
            action()
        times: dict[str, list[float]] = {name: [] for name in actions}
        names = list(actions)
        for repetition in range(options.repetitions):
            for name in names[repetition % 3 :] + names[: repetition % 3]:
                times[name].append(seconds_of(actions[name]))
    finally:
        shutil.rmtree(folder)
    rates = {name: sorted(num_tokens / value for value in values) for name, values in times.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["extraction"], strict=True))
        for name in names[:2]
    }
    print(
        json.dumps(
            {
                "benchmark": "extract",
                "num_tokens": num_tokens,
                "num_shards": len(shards),
                "codec": options.codec,
                "hidden_states_dtype": shape.hidden_states_dtype,
                "threads": options.threads,
                "repetitions": options.repetitions,
                "tokens_per_second": {
                    name: {"min": values[0], "median": statistics.median(values), "max": values[-1]}
                    for name, values in rates.items()
                },
                "ratio_to_bare_forward": ratios["bare"],
                "ratio_to_bare_forward_to_the_last_wanted_layer": ratios["bare_to_last_wanted_layer"],
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
