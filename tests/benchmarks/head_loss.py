"""The loss of supervised slots beside PyTorch's own linear_cross_entropy, gradient by the rows only; one JSON.

    python tests/benchmarks/head_loss.py [--rows 448] [--repeats 9] [--threads 2] [--clock wall|cpu]

``rows`` is the drafter's loss: a weight per row and the count of right first guesses included. ``torch sum`` has
neither; ``torch none`` could have weights, but makes the logits twice.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.loss import cross_entropy_rows

VOCAB_SIZE, HIDDEN_SIZE = 49_152, 576
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def make_runs(num_rows: int) -> dict[str, Callable[[], None]]:
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).mul_(0.05).bfloat16()
    rows = torch.randn(num_rows, HIDDEN_SIZE).bfloat16().requires_grad_()
    slopes = torch.randn(num_rows, VOCAB_SIZE).bfloat16()
    labels, weights = torch.randint(0, VOCAB_SIZE, (num_rows,)), torch.rand(num_rows)
    head = Head(weight_VH=weight)
    # The options measured fastest on CPUs; the defaults are several times slower there.
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None, acc_policy="balanced")

    def backward(loss: torch.Tensor) -> None:
        rows.grad = None
        loss.backward()

    @torch.no_grad()
    def floor() -> None:
        F.linear(rows, weight)
        slopes @ weight

    return {
        "floor": floor,
        "rows": lambda: backward((cross_entropy_rows(rows, labels, head)[0] * weights).sum()),
        "torch sum": lambda: backward(F.linear_cross_entropy(rows, weight, labels, reduction="sum", options=options)),
        "torch none": lambda: backward(
            (F.linear_cross_entropy(rows, weight, labels, reduction="none", options=options) * weights).sum()
        ),
        "plain": lambda: backward(
            (F.cross_entropy(F.linear(rows, weight).float(), labels, reduction="none") * weights).sum()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=448)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock, runs = CLOCKS[arguments.clock], make_runs(arguments.rows)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(arguments.repeats + 1):
        for name, run in runs.items():
            started = clock()
            run()
            if repeat:  # the first one warms up
                seconds[name].append(clock() - started)
    figures = {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in seconds.items()
    }
    settings = {"rows": arguments.rows, "threads": arguments.threads, "clock": arguments.clock}
    print(json.dumps({"torch": torch.__version__, **settings, "seconds": figures}, indent=2))


if __name__ == "__main__":
    main()
