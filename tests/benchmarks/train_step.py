"""Forward and backward of the drafter beside the time of its own matrix products alone; one JSON.

    python tests/benchmarks/train_step.py [--shape small|large|...] [--repeats 9] [--threads 2] [--device cpu|cuda]

The floor is every product that the step cannot do without, in bfloat16 with the step's shapes: fc, context keys and
values, q/k/v/o, MLP and head; forward, and the gradients that are needed (none with respect to cached states,
embedding and head). Floor and step alternate in one process; a ratio is the median over the pairs.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from dflash_tools.drafter.anchors import draw_anchors
from dflash_tools.drafter.blocks import Blocks, Context, build_blocks, build_context
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.loss import CHUNK_ROWS, block_loss
from dflash_tools.drafter.model import AttentionPath, DFlashDrafter, resolve_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A drafter and one batch: samples of one length, all tokens supervised."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_anchors: int
    num_tokens: int
    num_samples: int = 1


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
SHAPES = {
    "small": Shape(**SMOLLM2, block_size=8, num_anchors=64, num_tokens=430),
    "large": Shape(**SMOLLM2, block_size=8, num_anchors=256, num_tokens=1024),
    "packed": Shape(**SMOLLM2, block_size=8, num_anchors=64, num_tokens=300, num_samples=4),
    "qwen3-8b": Shape(**QWEN3_8B, block_size=16, num_anchors=512, num_tokens=2048),
}

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the step: rows x inputs by inputs x outputs, forward and the gradients it needs."""

    rows: int
    inputs: int
    outputs: int
    needs_input_gradient: bool = True
    needs_weight_gradient: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs * (1 + self.needs_input_gradient + self.needs_weight_gradient)


def make_config(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_hidden_layers=5,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=8192,
        initializer_range=0.02,
        layer_types=("full_attention",) * 5,
        sliding_window=None,
        block_size=shape.block_size,
        mask_token_id=0,
        target_layer_ids=(1, 2, 3, 4, 5),
        num_target_layers=30,
    )


def make_batch(shape: Shape, config: DrafterConfig) -> tuple[Context, Blocks]:
    rng = np.random.default_rng(0)
    lengths = [shape.num_tokens] * shape.num_samples
    ids = [rng.integers(0, shape.vocab_size, length).astype(np.int32) for length in lengths]
    masks = [np.ones(length, np.uint8) for length in lengths]
    anchors = [draw_anchors(m, shape.num_anchors, seed=0, epoch=0, sample_id=str(i)) for i, m in enumerate(masks)]
    states = torch.randn(sum(lengths), len(config.target_layer_ids), shape.hidden_size).bfloat16()
    blocks = build_blocks(ids, masks, anchors, block_size=shape.block_size, mask_token_id=0, gamma=4.0)
    return build_context(states, lengths), blocks


def products_of(config: DrafterConfig, context: Context, blocks: Blocks) -> list[Product]:
    """List the products of one step."""
    hidden, tokens, slots = config.hidden_size, len(context.positions_T), blocks.ids_AS.numel()
    query_width = config.num_attention_heads * config.head_dim
    key_width = config.num_key_value_heads * config.head_dim
    layer = [
        Product(tokens, hidden, key_width),
        Product(tokens, hidden, key_width),
        Product(slots, hidden, query_width),
        Product(slots, hidden, key_width),
        Product(slots, hidden, key_width),
        Product(slots, query_width, hidden),
        Product(slots, hidden, config.intermediate_size),
        Product(slots, hidden, config.intermediate_size),
        Product(slots, config.intermediate_size, hidden),
    ]
    # The head in chunks, as the step does it: products of all rows at once are slower for want of cache.
    head = [min(CHUNK_ROWS, blocks.num_slots - first) for first in range(0, blocks.num_slots, CHUNK_ROWS)]
    return [
        Product(tokens, hidden * len(config.target_layer_ids), hidden, needs_input_gradient=False),
        *layer * config.num_hidden_layers,
        *(Product(rows, hidden, config.vocab_size, needs_weight_gradient=False) for rows in head),
    ]


def make_floor(products: list[Product], device: torch.device) -> Callable[[], None]:
    """Prepare the operands of every product."""
    operands = []
    for product in products:
        x = torch.randn(product.rows, product.inputs, dtype=torch.bfloat16, device=device)
        weight = torch.randn(product.outputs, product.inputs, dtype=torch.bfloat16, device=device)
        slopes = torch.randn(product.rows, product.outputs, dtype=torch.bfloat16, device=device)
        operands.append((product, x, weight, slopes))

    @torch.no_grad()
    def run() -> None:
        for product, x, weight, slopes in operands:
            F.linear(x, weight)
            if product.needs_input_gradient:
                slopes @ weight
            if product.needs_weight_gradient:
                slopes.t() @ x

    return run


def make_step(
    config: DrafterConfig, context: Context, blocks: Blocks, device: torch.device, path: AttentionPath
) -> Callable[[], None]:
    """Prepare forward, loss and backward over float32 weights; gradients start empty as after an update."""
    model = DFlashDrafter(config).to(device)
    model.init_weights(0)
    embedding = (torch.randn(config.vocab_size, config.hidden_size) * 0.05).bfloat16().to(device)
    head = Head(weight_VH=embedding)
    context, blocks = context.to(device), blocks.to(device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        sums = block_loss(model(context, blocks, embedding, path), blocks, head)
        (sums.weighted_sum / sums.label_weight).backward()

    return run


def time_of(run: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def measure(
    shape: Shape, device: torch.device, repeats: int, extra_paths: list[AttentionPath], clock: Callable[[], float]
) -> dict[str, object]:
    config = make_config(shape)
    context, blocks = make_batch(shape, config)
    products = products_of(config, context, blocks)
    path = resolve_attention("auto", device)
    runs = {"floor": make_floor(products, device)}
    runs |= {p: make_step(config, context, blocks, device, p) for p in [path, *extra_paths]}
    for run in runs.values():
        time_of(run, device, clock)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(time_of(run, device, clock))
    flops = sum(product.flops for product in products)
    result: dict[str, object] = {
        "flops": flops,
        "num_slots": blocks.num_slots,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "floor_flops_per_second": flops / statistics.median(seconds["floor"]),
    }
    for name in runs:
        if name != "floor":
            pairs = zip(seconds["floor"], seconds[name], strict=True)
            result[f"floor_over_{name}"] = spread([floor / step for floor, step in pairs])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--also", choices=["dense", "split", "flex"], action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    results = {
        name: measure(SHAPES[name], device, arguments.repeats, arguments.also, CLOCKS[arguments.clock])
        for name in arguments.shape or ["small", "large"]
    }
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "clock": arguments.clock,
    }
    print(json.dumps({"torch": torch.__version__, "machine": machine, "shapes": results}, indent=2))


if __name__ == "__main__":
    main()
