"""From a file of a cache to a sample of the store."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tools.convert.cache_file import CacheFile, FileFault, read_tensors
from dflash_tools.convert.job import Job
from dflash_tools.convert.layouts import CachedSample, parse_sample
from dflash_tools.data.sample import has_supervised_pair
from dflash_tools.errors import ConfigError

TOO_FEW_SUPERVISED = "too_few_supervised"

# Notes of kept files.
PADDING_REMOVED = "padding_removed"
ROUNDED = "rounded_to_bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample of the store to be. Shapes: T tokens, K layers, H hidden size.

    Attributes:
        input_ids: Shape: (T,).
        loss_mask: 1 = supervised. Shape: (T,).
        conversation_id: 32 hex digits.
        states_TKH: In the dtype of the file; mapped if it was not read whole.
        last_TH: Last hidden state, if it is kept.
        notes: What happened to it.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    conversation_id: str
    states_TKH: Tensor
    last_TH: Tensor | None
    notes: tuple[str, ...]


def read_sample(job: Job, file: CacheFile, *, whole: bool) -> Sample:
    """Read one file.

    Args:
        job: Whose cache.
        file: Which file.
        whole: Read and check every byte; else only ids and mask are read, states are mapped.

    Raises:
        FileFault: If the file cannot become a sample.
        ConfigError: If the options do not fit what it holds.
        DataError: If the disk refuses to read it.
    """
    content = read_tensors(job.source / file.name, whole=whole)
    try:
        cached = parse_sample(
            content,
            job.layout,
            num_layers=len(job.layer_ids),
            hidden_size=job.target.hidden_size,
            keep_last=job.last_norm is not None,
        )
        loss_mask = _loss_mask(job, file, cached)
    except ConfigError as error:
        raise ConfigError(f"{job.source / file.name}: {error}") from None
    length = _length_without_padding(cached.input_ids, loss_mask, job.tokenizer_identity.pad_token_id)
    if not has_supervised_pair(loss_mask):
        raise FileFault(TOO_FEW_SUPERVISED, "no two supervised tokens follow each other, so there is nothing to draft")
    input_ids = cached.input_ids[:length]
    _check_ids(job, file, input_ids)
    notes = [PADDING_REMOVED] if length < len(cached.input_ids) else []
    if any(states is not None and states.dtype != torch.bfloat16 for states in (cached.states_SKH, cached.last_SH)):
        notes.append(ROUNDED)
    return Sample(
        input_ids=input_ids,
        loss_mask=loss_mask[:length],
        conversation_id=conversation_id(cached),
        states_TKH=cached.states_SKH[:length],
        last_TH=None if cached.last_SH is None else cached.last_SH[:length],
        notes=tuple(notes),
    )


def conversation_id(cached: CachedSample) -> str:
    """Hash the name that a file gives its conversation, else its token ids. Returns 32 hex digits."""
    if cached.conversation_id is not None:
        return hashlib.sha256(f"conversation {cached.conversation_id}".encode()).hexdigest()[:32]
    return hashlib.sha256(np.ascontiguousarray(cached.input_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def _loss_mask(job: Job, file: CacheFile, cached: CachedSample) -> NDArray[np.uint8]:
    if job.masks is not None:
        return job.masks.mask_of(file.name, cached.input_ids)
    if cached.loss_mask is not None:
        return cached.loss_mask
    if job.supervise_all:
        return np.ones(len(cached.input_ids), dtype=np.uint8)
    raise ConfigError(
        "has no loss_mask, so it does not say which tokens the target wrote. Give --masks with the dataset that the "
        "cache was made of (speculators: the folder with state.json), or --loss-on all to supervise every token"
    )


def _length_without_padding(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], pad_token_id: int | None
) -> int:
    """Length without the run of unsupervised pad tokens at the end, which no block ever looks at."""
    if pad_token_id is None:
        return len(input_ids)
    real = np.flatnonzero((input_ids != pad_token_id) | (loss_mask != 0))
    return int(real[-1]) + 1 if len(real) else 0


def _check_ids(job: Job, file: CacheFile, input_ids: NDArray[np.int32]) -> None:
    if input_ids.max() >= job.target.vocab_size:
        raise ConfigError(
            f"{job.source / file.name}: holds token id {input_ids.max()}, but {job.options.target.model} has only "
            f"{job.target.vocab_size} embedding rows; give the target that was cached"
        )
