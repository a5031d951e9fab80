"""Load the target, prove it, and make the shards that are missing."""

import importlib.util
from collections.abc import Sequence

import torch

from dflash_tools.config import TargetSection
from dflash_tools.extract.estimate import full_disk_explained
from dflash_tools.extract.forward import Forward, read_safe_tokens
from dflash_tools.extract.job import Job
from dflash_tools.extract.pipeline import Written, write_shards
from dflash_tools.extract.record import ExtractionRecord
from dflash_tools.extract.target_folder import ensure_target_folder
from dflash_tools.progress import Progress
from dflash_tools.store.writer import StoreWriter
from dflash_tools.target.load import Target, load_target
from dflash_tools.target.self_test import self_test


def write_states(
    writer: StoreWriter,
    job: Job,
    record: ExtractionRecord,
    shards: Sequence[tuple[int, int]],
    progress: Progress,
    *,
    write_target: bool,
) -> Written:
    """Make shards.

    Args:
        writer: Of the store; its tokens are written.
        job: What to extract.
        record: Says the number of CPU threads.
        shards: Those this process makes, in order.
        progress: Told of every batch.
        write_target: Also write STORE/target/ if it is not there.

    Raises:
        ConfigError: If the target cannot be loaded.
        StoreError: If the self-test fails, a state is not finite, memory or disk do not suffice.
    """
    # Set here, because the number of threads changes bits.
    torch.set_num_threads(record.threads)
    progress.say(_slow_layers(job, job.config.target) or f"loading the target {job.config.target.model}")
    target = load_target(job.config.target)
    # A budget of one token puts every sample into a batch of its own.
    self_test(target, record.target_layer_ids, batched=job.config.forward.token_budget > 1)
    progress.say(_describe(target, record))
    if write_target:
        with full_disk_explained(writer.store, "STORE/target is written"):
            ensure_target_folder(writer.store, target, job.tokenizer)
    forward = Forward(
        target=target,
        layer_ids=record.target_layer_ids,
        last=writer.shape.last_hidden_state,
        safe_tokens=read_safe_tokens(writer.store),
    )
    return write_shards(writer, forward, shards, progress)


def _describe(target: Target, record: ExtractionRecord) -> str:
    identity = target.identity
    weights = f", weights {identity.quantization}" if identity.quantization else ""
    return (
        f"{identity.architecture} on {target.device} in {identity.dtype}{weights}, {record.threads} CPU threads; "
        f"layers {', '.join(map(str, record.target_layer_ids))} of 0 to {identity.num_hidden_layers - 1} pass the "
        "self-test"
    )


def _slow_layers(job: Job, section: TargetSection) -> str | None:
    """Say before a slow run that fast kernels of a hybrid target are missing."""
    missing = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name) is None]
    if not job.target.has_linear_attention or not missing:
        return None
    return (
        f"loading the target {section.model}: its linear-attention layers run on slow reference code, because "
        f"{' and '.join(missing)} are not installed (packages flash-linear-attention, causal-conv1d)"
    )
