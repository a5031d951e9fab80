"""From rows of a plan to the tensors of a batch.

Tensor shapes: T tokens of all samples of the batch one after another, K captured layers, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tools.drafter.anchors import draw_anchors
from dflash_tools.drafter.blocks import Blocks, Context, build_blocks, build_context
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.store import Store
from dflash_tools.train.stores import Samples

RecordT = TypeVar("RecordT", Context, Blocks)

EVALUATION_EPOCH = -1
"""Key of the fixed anchors of held-out samples."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchRequest:
    """What to read for one batch.

    Attributes:
        batch: Position in the plan, or in the order of an evaluation.
        bucket_id: Bucket of its samples; -1 for a packed batch.
        epoch: Key of the anchors.
        rows: Sample rows. Shape: (batch_size,).
        num_anchors: Blocks of each sample. Shape: (batch_size,).
        num_tokens: Length of each sample. Shape: (batch_size,).
    """

    batch: int
    bucket_id: int
    epoch: int
    rows: NDArray[np.int64]
    num_anchors: NDArray[np.int64]
    num_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """One batch, ready for the drafter.

    Attributes:
        request: What was asked for.
        sample_ids: Identity of each sample.
        context: Hidden states of the target.
        blocks: Blocks at the drawn anchors.
        last_hidden_TH: Output of the target's last layer, where the loss reads it.
    """

    request: BatchRequest
    sample_ids: tuple[str, ...]
    context: Context
    blocks: Blocks
    last_hidden_TH: torch.Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Copy the tensors to a device without waiting."""
        last_hidden_TH = self.last_hidden_TH
        if last_hidden_TH is not None:
            last_hidden_TH = last_hidden_TH.to(device, non_blocking=True)
        context, blocks = self.context.to(device), self.blocks.to(device)
        return replace(self, context=context, blocks=blocks, last_hidden_TH=last_hidden_TH)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchReader:
    """Reads samples, draws their anchors and lays out tensors; threads may share it.

    Attributes:
        samples: The stores.
        drafter: Block size, mask token and layers.
        columns: The drafter's layers on the layer axis of the stores.
        gamma: Decay of the slot weights.
        seed: Key of the anchors.
        with_last_hidden: Also read the last hidden state.
        pin_memory: Use page-locked memory, from which a GPU copies without waiting.
    """

    samples: Samples
    drafter: DrafterConfig
    columns: Sequence[int]
    gamma: float
    seed: int
    with_last_hidden: bool
    pin_memory: bool

    def num_bytes(self, request: BatchRequest) -> int:
        """Memory of a batch, by its lengths alone: as if every slot were supervised."""
        manifest = self.samples.stores[0].manifest
        num_layers = len(manifest.target_layer_ids) + self.with_last_hidden
        state_bytes = int(request.num_tokens.sum()) * num_layers * manifest.hidden_size * 2
        return state_bytes + int(request.num_anchors.sum()) * self.drafter.block_size * 28

    def read(self, request: BatchRequest) -> Batch:
        """Make one batch.

        Raises:
            StoreError: If a sample is missing or damaged; nothing ever takes its place.
        """
        sample_ids = tuple(str(self.samples.sample_ids[row]) for row in request.rows)
        tokens = [store.read_tokens(row) for store, row in map(self.samples.locate, request.rows.tolist())]
        anchors = [
            draw_anchors(mask, int(count), seed=self.seed, epoch=request.epoch, sample_id=sample_id)
            for (_, mask), count, sample_id in zip(tokens, request.num_anchors, sample_ids, strict=True)
        ]
        blocks = build_blocks(
            [ids for ids, _ in tokens],
            [mask for _, mask in tokens],
            anchors,
            block_size=self.drafter.block_size,
            mask_token_id=self.drafter.mask_token_id,
            gamma=self.gamma,
        )
        context = build_context(self._read_states(request), request.num_tokens.tolist())
        if self.pin_memory:
            context, blocks = _pin(context), _pin(blocks)
        last_hidden_TH = self._read_last_hidden(request) if self.with_last_hidden else None
        return Batch(
            request=request, sample_ids=sample_ids, context=context, blocks=blocks, last_hidden_TH=last_hidden_TH
        )

    def _read_states(self, request: BatchRequest) -> torch.Tensor:
        manifest = self.samples.stores[0].manifest
        layer_ids = manifest.target_layer_ids
        states_TKH = self._empty(request, len(layer_ids), manifest.hidden_size)
        for store, row, bits in self._pieces(request, states_TKH):
            store.read_into(row, bits)
        if list(self.columns) == list(range(len(layer_ids))):
            return states_TKH
        return states_TKH[:, list(self.columns)].contiguous()

    def _read_last_hidden(self, request: BatchRequest) -> torch.Tensor:
        last_hidden_TH = self._empty(request, self.samples.stores[0].manifest.hidden_size)
        for store, row, bits in self._pieces(request, last_hidden_TH):
            store.read_last_hidden_state(row, bits)
        return last_hidden_TH

    def _empty(self, request: BatchRequest, *shape: int) -> torch.Tensor:
        return torch.empty((int(request.num_tokens.sum()), *shape), dtype=torch.bfloat16, pin_memory=self.pin_memory)

    def _pieces(self, request: BatchRequest, states: torch.Tensor) -> Iterator[tuple[Store, int, NDArray[np.uint16]]]:
        """Each sample's store, its row there, and the place of its states in the batch."""
        bits = states.view(torch.uint16).numpy()
        start = 0
        for row, length in zip(request.rows.tolist(), request.num_tokens.tolist(), strict=True):
            yield (*self.samples.locate(row), bits[start : start + length])
            start += length


def _pin(record: RecordT) -> RecordT:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    pinned: dict[str, Any] = {k: v.pin_memory() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(record, **pinned)
