"""What one drafter forward reads: the context of a batch and a flat list of blocks.

Samples lie one after another on a single token axis, so bucketed and packed batches are the same thing and no padding
is computed. In shapes: T tokens of all samples, D documents (samples), K captured layers, H hidden size, A blocks,
S slots of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """Hidden states of the documents of a batch.

    Attributes:
        hidden_states_TKH: Captured states, in the drafter's layer order.
        document_ids_T: Document of each token, ascending; -1 for padding at the end. int64.
        positions_T: Position of each token in its document. int64.
        offsets: Document d holds tokens ``offsets[d]:offsets[d + 1]``. Length: D + 1.
    """

    hidden_states_TKH: Tensor
    document_ids_T: Tensor
    positions_T: Tensor
    offsets: tuple[int, ...]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Context":
        """Copy to a device without waiting, the states optionally to another dtype."""
        moved = replace(self, **_moved(self, device))
        return moved if dtype is None else replace(moved, hidden_states_TKH=moved.hidden_states_TKH.to(dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks of a batch, by document and then by anchor, both ascending. No block is a filler.

    Attributes:
        document_ids_A: Document of each block. int64.
        anchors_A: Position of the anchor in its document. int64.
        ids_AS: The anchor's token and mask tokens. int64.
        labels_AS: Token at anchor + slot; -100 where unsupervised. Slot 0 is never supervised. int64.
        weights_AS: exp(-(slot - 1) / gamma); 0 where unsupervised. float32.
        supervised_A: Supervised slots of each block: slots 1..n. int64.
        slot_rows_N: Places of the supervised slots when blocks and slots are one axis, ascending. int64.
        offsets: Document d holds blocks ``offsets[d]:offsets[d + 1]``. Length: D + 1.
        label_weight: Sum of the weights.
    """

    document_ids_A: Tensor
    anchors_A: Tensor
    ids_AS: Tensor
    labels_AS: Tensor
    weights_AS: Tensor
    supervised_A: Tensor
    slot_rows_N: Tensor
    offsets: tuple[int, ...]
    label_weight: float

    def __len__(self) -> int:
        return len(self.anchors_A)

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.ids_AS.shape[1]

    @property
    def num_slots(self) -> int:
        """Number of supervised slots."""
        return len(self.slot_rows_N)

    @property
    def whole_A(self) -> Tensor:
        """True for blocks whose slots are all supervised (but slot 0)."""
        return self.supervised_A == self.block_size - 1

    @property
    def positions_AS(self) -> Tensor:
        """Position of each slot in its document."""
        return self.anchors_A[:, None] + torch.arange(self.block_size, device=self.anchors_A.device)

    def to(self, device: torch.device | str) -> "Blocks":
        """Copy to a device without waiting."""
        return replace(self, **_moved(self, device))


def build_context(hidden_states_TKH: Tensor, lengths: Sequence[int]) -> Context:
    """Describe concatenated documents.

    Args:
        hidden_states_TKH: States of all documents one after another; rows past their sum are padding.
        lengths: Tokens of each document.

    Raises:
        ValueError: If there are fewer rows than tokens.
    """
    num_rows, num_tokens = len(hidden_states_TKH), sum(lengths)
    if num_rows < num_tokens:
        raise ValueError(f"documents have {num_tokens} tokens, but there are only {num_rows} rows of hidden states")
    document_ids = np.full(num_rows, -1, dtype=np.int64)
    document_ids[:num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.zeros(num_rows, dtype=np.int64)
    if lengths:
        positions[:num_tokens] = np.concatenate([np.arange(length) for length in lengths])
    device = hidden_states_TKH.device
    return Context(
        hidden_states_TKH=hidden_states_TKH,
        document_ids_T=torch.from_numpy(document_ids).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        offsets=_offsets(lengths),
    )


def build_blocks(
    input_ids: Sequence[NDArray[np.int32]],
    loss_masks: Sequence[NDArray[np.uint8]],
    anchors: Sequence[NDArray[np.int64]],
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Build the blocks of a batch.

    Slot k of a block at anchor a has the label ``input_ids[a + k]``: no shift. Supervision stops at the first slot that
    is unsupervised or lies past the document, as decoding never goes past a turn's end.

    Args:
        input_ids: Token ids, one array per document. Shape: (num_tokens,) each.
        loss_masks: 1 for a supervised token, one array per document.
        anchors: Ascending anchors, one array per document.
        block_size: Slots of a block.
        mask_token_id: Fills slots 1 and later.
        gamma: Decay of the slot weights.

    Raises:
        ValueError: If the sequences differ in length.
    """
    counts = [len(positions) for positions in anchors]
    documents = zip(input_ids, loss_masks, anchors, strict=True)
    labels = np.concatenate([np.empty((0, block_size), np.int64)] + [_labels(*d, block_size) for d in documents])
    supervised = labels >= 0
    supervised[:, 0] = False
    slot_weights = np.exp(-(np.arange(block_size) - 1) / gamma)
    weights = np.where(supervised, slot_weights, 0.0)
    ids = np.full(labels.shape, mask_token_id, dtype=np.int64)
    ids[:, 0] = labels[:, 0]
    return Blocks(
        document_ids_A=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        anchors_A=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *anchors])),
        ids_AS=torch.from_numpy(ids),
        labels_AS=torch.from_numpy(np.where(supervised, labels, -100)),
        weights_AS=torch.from_numpy(weights.astype(np.float32)),
        supervised_A=torch.from_numpy(supervised.sum(axis=1)),
        offsets=_offsets(counts),
        slot_rows_N=torch.from_numpy(np.flatnonzero(supervised)),
        label_weight=float(weights.sum()),
    )


def _labels(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], anchors: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Tokens of each block, -100 from the first unsupervised slot on. Slot 0 always holds the anchor's token."""
    positions = anchors[:, None] + np.arange(block_size)
    clipped = np.minimum(positions, len(input_ids) - 1)
    keep = (positions < len(input_ids)) & (loss_mask[clipped] != 0)
    keep[:, 0] = True
    keep = np.logical_and.accumulate(keep, axis=1)
    labels: NDArray[np.int64] = np.where(keep, input_ids[clipped], -100).astype(np.int64)
    return labels


def _offsets(counts: Sequence[int]) -> tuple[int, ...]:
    return (0, *(int(total) for total in np.cumsum(np.asarray(counts, dtype=np.int64))))


def _moved(record: Context | Blocks, device: torch.device | str) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value.to(device, non_blocking=True) for name, value in values.items() if isinstance(value, Tensor)}
