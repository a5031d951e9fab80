"""``train --dry-run``: what a run will take, measured on this machine where that is cheap."""

import os
import time
from typing import Any

import numpy as np
import torch

from dflash_tools.train.batch import BatchRequest
from dflash_tools.train.step import Learner
from dflash_tools.train.work import Work, probe_largest_batch

DISK_PROBE_SECONDS = 2.0


def describe_run(work: Work, learner: Learner) -> dict[str, Any]:
    """Estimate a run.

    Args:
        work: Plan and data.
        learner: A fresh drafter; its weights stay as they are.

    Returns:
        Parameters, steps, tokens, memory, the read rate that compute on this device asks for, the rate that a short
        probe of this disk gave, and the first batches.

    Raises:
        UserError: If the largest batch does not fit into memory.
    """
    plan, samples = work.plan, work.reader.samples
    frozen_bytes = samples.stores[0].manifest.target.vocab_size * samples.stores[0].manifest.hidden_size * 2
    state_bytes = np.array([work.reader.num_bytes(work.request(batch)) for batch in _some_batches(len(plan), 64)])
    probe_largest_batch(learner, work)
    compute_seconds = _time_typical_batch(work, learner)
    largest = work.request(int(np.argmax(work.costs)))
    read_rate = _probe_disk(work)
    return {
        "num_parameters": learner.num_parameters,
        "steps": plan.num_steps,
        "epochs": int(plan.epochs[-1]) + 1,
        "batches": len(plan),
        "samples_per_epoch": int(np.count_nonzero(samples.columns.is_training)),
        "held_out_samples": len(samples.validation_rows),
        "num_tokens": int(samples.num_tokens[plan.sample_rows].sum()),
        "num_anchors": int(work.anchors_of_row[plan.sample_rows].sum()),
        "largest_batch": _describe_batch(largest),
        "memory_bytes": {
            "weights_gradients_moments": learner.num_state_bytes + 4 * learner.num_parameters,
            "frozen_embedding_and_head": frozen_bytes,
            "activations_of_largest_batch": _activation_bytes(work, int(largest.num_anchors.sum())),
            "batches_read_ahead": work.config.hardware.prefetch_bytes,
            "checkpoint_copy": learner.num_state_bytes,
        },
        "available_memory_bytes": _available_bytes(learner.device),
        "checkpoint_bytes": learner.num_state_bytes,
        "seconds_per_batch": compute_seconds,
        "estimated_hours": compute_seconds * len(plan) / 3600,
        "needed_bytes_per_second": float(state_bytes.mean()) / compute_seconds,
        "probed_read_bytes_per_second": read_rate,
        "first_batches": [_describe_batch(work.request(batch)) for batch in range(min(5, len(plan)))],
    }


def _describe_batch(request: BatchRequest) -> dict[str, int]:
    return {
        "batch": request.batch,
        "bucket_id": request.bucket_id,
        "samples": len(request.rows),
        "tokens": int(request.num_tokens.sum()),
        "anchors": int(request.num_anchors.sum()),
    }


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _some_batches(num_batches: int, count: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, num_batches - 1, min(count, num_batches)).tolist()})


def _time_typical_batch(work: Work, learner: Learner) -> float:
    """Time forward and backward of the batch of median cost, scaled to the mean cost. Unit: seconds."""
    batch = int(np.argsort(work.costs)[len(work.costs) // 2])
    made = work.reader.read(work.request(batch))
    learner.probe(made)
    started = time.perf_counter()
    learner.probe(made)
    return (time.perf_counter() - started) * float(work.costs.mean() / work.costs[batch])


def _activation_bytes(work: Work, num_anchors: int) -> int:
    """Estimate what forward keeps for backward: bfloat16 rows of every layer, for every block slot.

    Per slot and layer about ten rows of the hidden width, two of the attention width and four of the MLP width.
    """
    config = work.reader.drafter
    attention_width = config.num_attention_heads * config.head_dim
    row = 10 * config.hidden_size + 2 * attention_width + 4 * config.intermediate_size
    rows = config.num_hidden_layers * row
    if work.config.hardware.recompute_layers:
        rows = row + config.num_hidden_layers * config.hidden_size  # one layer at a time, and the input of each
    return num_anchors * config.block_size * rows * 2


def _probe_disk(work: Work) -> float:
    """Read batches from all over the plan for a moment. Unit: bytes per second; a warm page cache counts."""
    started, num_bytes = time.perf_counter(), 0
    for batch in np.random.default_rng(0).permutation(len(work.plan))[:1000].tolist():
        request = work.request(batch)
        work.reader.read(request)
        num_bytes += work.reader.num_bytes(request)
        if time.perf_counter() - started > DISK_PROBE_SECONDS:
            break
    return num_bytes / (time.perf_counter() - started)
