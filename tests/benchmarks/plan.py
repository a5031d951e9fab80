"""Speed of planning, and what its settings trade; prints the tables of docs/benchmarks/plan_*.md as Markdown.

    python tests/benchmarks/plan.py [scale | window | strategies | ranks | edges]... [--repeats 5] [--num-samples N]

The mix: log-normal lengths, median 800 tokens, sigma 1, clipped to 16..8192; six buckets of equal token mass; a half of
the tokens supervised, at most 512 anchors a sample.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.anchors import anchors_per_sample
from dflash_tools.plan.buckets import assign_buckets, choose_edges, choose_edges_optimal
from dflash_tools.plan.composition import repeated_pairs
from dflash_tools.plan.cost import DrafterShape, batch_work, estimate_flops
from dflash_tools.plan.dealing import deal_to_ranks
from dflash_tools.plan.statistics import (
    batch_lengths,
    count_equal_neighbours,
    entropy_by_step,
    fewest_equal_neighbours,
    lag_correlations,
    rule_alone_correlations,
)
from dflash_tools.plan.table import load_plan, save_plan

STRATEGIES = ("interleave", "weighted", "shuffle", "sequential", "packed")
QWEN3_8B = DrafterShape(
    hidden_size=4096,
    vocab_size=151936,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    num_target_features=5,
    block_size=16,
)


def make_mix(count, seed=0):
    """Lengths, bucket ids and anchors of the mix."""
    draws = np.random.default_rng(seed).normal(np.log(800), 1.0, count)
    lengths = np.clip(np.exp(draws), 16, 8192).astype(np.int64)
    return lengths, assign_buckets(lengths, choose_edges(lengths, 6)), anchors_per_sample(lengths // 2, 512)


def print_table(title, head, rows):
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def efficiency_of(plan, lengths):
    figures = batch_lengths(plan, lengths)
    return figures.num_tokens.sum() / figures.num_padded_tokens.sum()


def mean_lengths(plan, lengths):
    figures = batch_lengths(plan, lengths)
    return figures.num_tokens / figures.num_samples


def measure_scale(strategy, num_samples, anchor_budget):
    """One repetition, in a process of its own: seconds, and the peak of its memory."""
    lengths, bucket_ids, anchors = make_mix(num_samples)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    options = PlanSettings(strategy=strategy, num_epochs=1, anchor_budget=anchor_budget)
    plan = build_plan(lengths, bucket_ids, options, anchors)
    figures = {"plan": time.perf_counter() - started, "cpu": time.process_time() - cpu, "num_batches": len(plan)}
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures["before_mb"] = before / 1024
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.parquet"
        started = time.perf_counter()
        save_plan(plan, path)
        figures["save"], started = time.perf_counter() - started, time.perf_counter()
        load_plan(path)
        figures["load"], figures["file_mb"] = time.perf_counter() - started, path.stat().st_size / 1e6
    print(json.dumps(figures))


def report_scale(num_samples, repeats):
    rows = []
    cases = [(s, num_samples, None) for s in STRATEGIES]
    cases += [("interleave", num_samples, 2048), ("packed", num_samples, 2048), ("interleave", num_samples // 10, None)]
    for strategy, count, budget in cases:
        command = [sys.executable, __file__, "--child", strategy, str(count), str(budget or 0)]
        runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(repeats)]

        def spread(key, runs=runs):
            values = [run[key] for run in runs]
            return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"

        memory = f"{max(run['peak_mb'] for run in runs):.0f} ({runs[0]['before_mb']:.0f})"
        name = f"{strategy}, anchor_budget {budget}" if budget else strategy
        columns = [name, f"{count:,}", f"{runs[0]['num_batches']:,}", spread("plan"), spread("cpu"), memory]
        rows.append([*columns, f"{runs[0]['file_mb']:.1f}", spread("save"), spread("load")])
    head = ["strategy", "samples", "batches", "plan, s", "CPU, s", "peak MB (before)", "file MB", "save, s", "load, s"]
    print_table("Scale: one epoch (min / median / max)", head, rows)


def report_window(repeats):
    for count in (5_000, 50_000):
        rows = []
        for window in (1, 2, 4, 8, 16, 32, 64):
            figures = []
            for seed in range(repeats):
                lengths, bucket_ids, _ = make_mix(count, seed)
                plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2, sort_window=window, seed=seed))
                means = mean_lengths(plan, lengths)
                lag = lag_correlations(means, plan.epochs, 1)[0]
                rule = rule_alone_correlations(means, plan.bucket_ids, plan.epochs, 1)[0]
                figures.append([efficiency_of(plan, lengths), repeated_pairs(plan)[0], lag, rule, len(plan) / 2])
            low, mean, high = np.min(figures, axis=0), np.mean(figures, axis=0), np.max(figures, axis=0)
            cells = [f"{mean[i]:.3f} ({low[i]:.3f} .. {high[i]:.3f})" for i in range(4)]
            rows.append([str(window), *cells, f"{mean[4]:.0f}"])
        head = ["sort_window", "padding efficiency", "repeated pairs", "lag-1 correlation", "rule alone", "batches"]
        print_table(f"Window: {count:,} samples, mean (min .. max) of {repeats} mixes", head, rows)


def report_strategies():
    lengths, bucket_ids, anchors = make_mix(50_000)
    rows, base = [], {}
    for strategy in ("shuffle", *(s for s in STRATEGIES if s != "shuffle")):
        plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=2, strategy=strategy), anchors)
        whole = plan.steps < plan.num_steps - 1
        step = plan.steps[whole]
        length = np.bincount(step, mean_lengths(plan, lengths)[whole]) / np.bincount(step)
        blocks = np.bincount(step, np.add.reduceat(anchors[plan.sample_rows], plan.offsets[:-1])[whole])
        spread = {"length": length.std() / length.mean(), "blocks": blocks.std() / blocks.mean()}
        base = base or spread
        equal = count_equal_neighbours(plan.bucket_ids, plan.epochs)
        fewest = fewest_equal_neighbours(plan.bucket_ids, plan.epochs)
        is_packed = strategy == "packed"
        rows.append(
            [
                strategy,
                f"{efficiency_of(plan, lengths):.3f}",
                "-" if is_packed else f"{equal:,} ({fewest:,})",
                f"{lag_correlations(mean_lengths(plan, lengths), plan.epochs, 1)[0]:+.2f}",
                "-" if is_packed else f"{entropy_by_step(plan.bucket_ids, plan.steps).mean():.2f}",
                f"{spread['length']:.3f} ({spread['length'] / base['length'] - 1:+.0%})",
                f"{spread['blocks']:.3f} ({spread['blocks'] / base['blocks'] - 1:+.0%})",
                f"{np.nanmean(repeated_pairs(plan)):.3f}",
            ]
        )
    head = ["strategy", "padding efficiency", "equal neighbours (fewest)", "lag-1 correlation", "bits per step"]
    head += ["spread of mean length per step", "spread of blocks per step", "repeated pairs"]
    print_table("Strategies: 50,000 samples, 2 epochs, 8 batches a step (in brackets: beside shuffle)", head, rows)


def report_ranks():
    lengths, bucket_ids, anchors = make_mix(20_000)
    rows = []
    for budget in (None, 4096, 2048, 1024):
        options = PlanSettings(num_epochs=1, anchor_budget=budget)
        plan = build_plan(lengths, bucket_ids, options, anchors)
        costs = estimate_flops(batch_work(plan, lengths, anchors, QWEN3_8B.block_size), QWEN3_8B)
        steps = [costs[plan.batches_of_step(s).start : plan.batches_of_step(s).stop] for s in range(plan.num_steps - 1)]
        generator = np.random.default_rng(0)
        for ranks in (2, 4, 8):
            by_index = [step.reshape(-1, ranks).sum(axis=0) for step in steps]
            at_random = [generator.permutation(step).reshape(-1, ranks).sum(axis=0) for step in steps]
            by_cost = [np.array([step[part].sum() for part in deal_to_ranks(step, ranks)]) for step in steps]
            # A step lasts as long as its busiest rank: the sum of those over the epoch, beside perfect balance.
            ratios = [
                sum(loads.max() for loads in way) / sum(loads.mean() for loads in way)
                for way in (by_index, at_random, by_cost)
            ]
            efficiency = f"{efficiency_of(plan, lengths):.3f}"
            cells = [f"{ratio:.3f}" for ratio in ratios]
            rows.append([str(budget or "none"), str(ranks), *cells, f"{len(plan):,}", efficiency])
    head = ["anchor_budget", "ranks", "by index", "at random", "by cost", "batches", "padding efficiency"]
    print_table("Ranks: largest / mean cost per step, 8 batches a step, 20,000 samples", head, rows)


def report_edges():
    lengths, _, anchors = make_mix(50_000)
    rows = []
    for count in (1, 2, 4, 6, 12):
        for name, choose in (("equal tokens", choose_edges), ("least padding", choose_edges_optimal)):
            started = time.perf_counter()
            edges = choose(lengths, count)
            seconds = time.perf_counter() - started
            bucket_ids = assign_buckets(lengths, edges)
            plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=1), anchors)
            to_edge = lengths.sum() / edges[bucket_ids].sum()
            cells = [f"{to_edge:.3f}", f"{efficiency_of(plan, lengths):.3f}", f"{seconds:.3f}"]
            rows.append([str(count), name, " ".join(map(str, edges)), *cells])
    head = ["buckets", "rule", "edges", "efficiency padded to the edge", "efficiency of the plan", "s"]
    print_table("Edges: 50,000 samples", head, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["scale", "window", "strategies", "ranks", "edges"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-samples", type=int, default=2_000_000)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        strategy, count, budget = arguments.child
        measure_scale(strategy, int(count), int(budget) or None)
        return
    reports = {
        "scale": lambda: report_scale(arguments.num_samples, arguments.repeats),
        "window": lambda: report_window(arguments.repeats),
        "strategies": report_strategies,
        "ranks": report_ranks,
        "edges": report_edges,
    }
    for part in arguments.parts:
        reports[part]()


if __name__ == "__main__":
    main()
