"""What a batch costs to train on, estimated from shapes alone: arithmetic, memory, and how many shapes there are.

In formulas: T context tokens, N blocks, B block size, Q = N B slots, K captured layers, H hidden size, V vocabulary,
D layers. A batch is flat: neither its context nor its blocks are padded.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_tools.contracts.plan import BatchPlan

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_HEAD_CHUNK_ROWS = 512  # slots whose logits exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """The sizes of a drafter that decide its cost; names as in DFlash checkpoints."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_target_features: int  # captured layers
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWork:
    """What goes through the drafter for every batch. Shape of each: (num_batches,).

    Attributes:
        num_tokens: Context tokens.
        num_anchors: Blocks.
        num_pairs: Pairs of a slot and a token or slot that it sees.
    """

    num_tokens: Counts
    num_anchors: Counts
    num_pairs: Floats


class ShapeCensus(NamedTuple):
    """How many shapes of batch a compiled drafter would meet."""

    num_batches: int
    num_shapes: int  # distinct pairs of context tokens and blocks, rounded up
    added_tokens: float  # share that rounding adds to the context tokens
    added_anchors: float  # share that rounding adds to the blocks


def batch_work(plan: BatchPlan, num_tokens: ArrayLike, num_anchors: ArrayLike, block_size: int) -> BatchWork:
    """Count the work of every batch.

    Anchors are not drawn yet: on average one lies in the middle of its sample, and a slot sees half of the sample and
    its own block.

    Args:
        plan: The plan; it holds at least one batch.
        num_tokens: Length of every row of the index. Shape: (num_rows,).
        num_anchors: Blocks of every row of the index. Shape: (num_rows,).
        block_size: Slots of a block.
    """
    lengths = np.asarray(num_tokens, dtype=np.int64)[plan.sample_rows]
    anchors = np.asarray(num_anchors, dtype=np.int64)[plan.sample_rows]
    starts = plan.offsets[:-1]
    return BatchWork(
        num_tokens=np.add.reduceat(lengths, starts),
        num_anchors=np.add.reduceat(anchors, starts),
        num_pairs=np.add.reduceat(anchors * block_size * (lengths / 2 + block_size), starts),
    )


def estimate_flops(work: BatchWork, shape: DrafterShape) -> Floats:
    """Estimate the arithmetic of forward and backward, two per multiply-add. Shape: (num_batches,).

    Backward costs twice the forward where weights and inputs both need a gradient, once where only one of them does:
    the inputs of ``fc`` are data, and the head is frozen.
    """
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    fused = 2 * work.num_tokens * shape.num_target_features * shape.hidden_size * shape.hidden_size
    context = 2 * work.num_tokens * shape.hidden_size * 2 * keys
    slots = work.num_anchors * shape.block_size
    projections = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    attention = 2 * work.num_pairs * 2 * queries
    head = 2 * work.num_anchors * (shape.block_size - 1) * shape.hidden_size * shape.vocab_size
    per_layer = context + 2 * slots * projections + attention
    flops: Floats = 2.0 * fused + 3.0 * shape.num_hidden_layers * per_layer + 2.0 * head
    return flops


def estimate_bytes(work: BatchWork, shape: DrafterShape, *, value_bytes: int = 2) -> Floats:
    """Estimate the memory that a batch adds to weights and optimizer at its peak. Shape: (num_batches,).

    Counted are the inputs, what backward needs of every layer, and the logits of one chunk of the head with their
    gradient. Attention keeps no scores. It ranks batches well, and is within a factor of two in absolute terms.

    Args:
        work: The work of every batch.
        shape: The drafter.
        value_bytes: Bytes of an activation: 2 under bfloat16 autocast, 4 without.
    """
    hidden, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Captured states, their projection and its norm; per layer keys and values before and after norm and rotation.
    per_token = 2 * shape.num_target_features * hidden + value_bytes * (2 * hidden + shape.num_hidden_layers * 4 * keys)
    # Both norms with their inputs and the two residual sums; q, k, v before and after norm and rotation, the mixed
    # values; gate, up, their product and its factor.
    per_slot_and_layer = value_bytes * (6 * hidden + 4 * queries + 4 * keys + 4 * mlp)
    per_slot = shape.num_hidden_layers * per_slot_and_layer + (2 * value_bytes + 8) * hidden
    slots = work.num_anchors * shape.block_size
    logits = 3 * 4 * shape.vocab_size * np.minimum(slots, _HEAD_CHUNK_ROWS)
    total: Floats = (work.num_tokens * per_token + slots * per_slot + logits).astype(np.float64)
    return total


def count_shapes(work: BatchWork, *, token_multiple: int = 1, anchor_multiple: int = 1) -> ShapeCensus:
    """Count the distinct shapes of batch, and what fewer of them would cost.

    Args:
        work: The work of every batch.
        token_multiple: Context tokens of a batch are rounded up to this multiple.
        anchor_multiple: Blocks of a batch are rounded up to this multiple.
    """
    tokens = -(-work.num_tokens // token_multiple) * token_multiple
    anchors = -(-work.num_anchors // anchor_multiple) * anchor_multiple
    return ShapeCensus(
        num_batches=len(tokens),
        num_shapes=len(np.unique(np.stack([tokens, anchors]), axis=1).T),
        added_tokens=_added(work.num_tokens, tokens),
        added_anchors=_added(work.num_anchors, anchors),
    )


def _added(real: Counts, rounded: Counts) -> float:
    return float(rounded.sum() / max(int(real.sum()), 1) - 1) if real.any() else 0.0
