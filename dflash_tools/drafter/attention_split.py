"""The attention path for CPUs: context part and block part apart, with one softmax over both.

Blocks are taken in chunks of neighbours of one document. As anchors are sorted, a chunk reads only the context before
its last anchor, and only the tokens between its first and last anchor need a mask. No score of a slot with a foreign
block is ever computed, and there is no mask over all queries and all tokens.

In shapes: A blocks, C blocks of a chunk, S slots, T tokens, Q query heads, G key/value heads, R = S * Q / G rows of a
block that share a key head, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_tools.drafter.blocks import Blocks, Context
from dflash_tools.drafter.layers import Attend
from dflash_tools.drafter.visibility import sees_context, sees_slot

# Scores of a chunk: large enough for efficient products, small enough for the cache.
CHUNK_SCORES = 1 << 20
MIN_CHUNK_BLOCKS = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Neighbouring blocks of a document and the tokens that they may see.

    Attributes:
        num_blocks: Number of blocks; chunks follow each other on the block axis.
        tokens: Slice of the token axis that ends before the last anchor.
        num_common: Tokens at its start that every slot of the chunk sees.
        hidden: True where a slot does not see a token, for the tokens after the common ones; None if all do.
            Shape: (C, 1 or S, tokens - common).
    """

    num_blocks: int
    tokens: slice
    num_common: int
    hidden: Tensor | None


def make_split_attend(context: Context, blocks: Blocks, num_heads: int, sliding_window: int | None) -> Attend:
    """Prepare attention for one batch.

    Args:
        context: Documents of the batch.
        blocks: Blocks of the batch.
        num_heads: Query heads.
        sliding_window: Window of the sliding layers.
    """
    full = _make_chunks(context, blocks, num_heads, None)
    sliding = [] if sliding_window is None else _make_chunks(context, blocks, num_heads, sliding_window)
    slots = torch.arange(blocks.block_size, device=blocks.anchors_A.device)
    slot_hidden_SS = None if sliding_window is None else ~sees_slot(slots[:, None], slots, sliding_window)

    def attend(q_ASQD: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, slides: bool) -> Tensor:
        # One transposition of each tensor serves all chunks; heads of one key head become rows.
        num_blocks, block_size, num_heads, head_dim = q_ASQD.shape
        num_key_heads = ck.shape[1]
        grouped_shape = (num_blocks, block_size, num_key_heads, num_heads // num_key_heads, head_dim)
        grouped = q_ASQD.view(grouped_shape) * head_dim**-0.5
        q_GARD = grouped.permute(2, 0, 1, 3, 4).flatten(2, 3)
        context_kv = ck.transpose(0, 1), cv.transpose(0, 1)
        chunks, hidden_slots = (sliding, slot_hidden_SS) if slides else (full, None)
        # Splitting, not slicing: the gradient of each slice would fill a whole tensor with zeros.
        sizes = [chunk.num_blocks for chunk in chunks]
        pieces = (torch.split(x, sizes, dim=1) for x in (q_GARD, bk.permute(2, 0, 1, 3), bv.permute(2, 0, 1, 3)))
        parts = [
            _attend_chunk(queries, context_kv, (keys, values), chunk, hidden_slots)
            for chunk, queries, keys, values in zip(chunks, *pieces, strict=True)
        ]
        out_GARD = torch.cat(parts, dim=1) if parts else q_GARD
        out = out_GARD.view(num_key_heads, num_blocks, block_size, num_heads // num_key_heads, head_dim)
        return out.permute(1, 2, 0, 3, 4).reshape(num_blocks, block_size, num_heads, head_dim)

    return attend


def _attend_chunk(
    q_GCRD: Tensor,
    context_kv: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    chunk: _Chunk,
    hidden_slots_SS: Tensor | None,
) -> Tensor:
    """Attend from the blocks of a chunk. Returns: Shape (G, C, R, D)."""
    num_key_heads, num_blocks, num_rows, head_dim = q_GCRD.shape
    keys_GTD, values_GTD = (part[:, chunk.tokens] for part in context_kv)
    keys_GCSD, values_GCSD = block_kv
    block_size, num_tokens = keys_GCSD.shape[2], keys_GTD.shape[1]
    flat_queries = q_GCRD.reshape(num_key_heads, -1, head_dim)
    in_context = torch.bmm(flat_queries, keys_GTD.transpose(1, 2))
    in_block = torch.matmul(q_GCRD, keys_GCSD.transpose(2, 3))
    # Hidden scores become -inf, so their probability and hence their gradient are exactly 0: the filling itself need
    # not be differentiated, which would copy the scores once more.
    with torch.no_grad():
        shape = (num_key_heads, num_blocks, block_size, -1)
        if chunk.hidden is not None:
            scores = in_context.view(*shape, num_tokens)[..., chunk.num_common :]
            scores.masked_fill_(chunk.hidden[:, :, None, :], float("-inf"))
        if hidden_slots_SS is not None:
            in_block.view(*shape, block_size).masked_fill_(hidden_slots_SS[:, None, :], float("-inf"))
    joint = torch.cat((in_context.view(num_key_heads, num_blocks, num_rows, -1), in_block), dim=-1).softmax(dim=-1)
    to_context, to_block = torch.split(joint, [num_tokens, block_size], dim=-1)
    from_context = torch.bmm(to_context.flatten(1, 2), values_GTD).view(q_GCRD.shape)
    return from_context + torch.matmul(to_block, values_GCSD)


def _make_chunks(context: Context, blocks: Blocks, num_heads: int, window: int | None) -> list[_Chunk]:
    anchors = blocks.anchors_A.tolist()
    most_pairs = CHUNK_SCORES // (blocks.block_size * num_heads)  # of a block and a token
    chunks = []
    for document, (first, last) in enumerate(zip(blocks.offsets[:-1], blocks.offsets[1:], strict=True)):
        start = context.offsets[document]
        while first < last:
            end = min(first + MIN_CHUNK_BLOCKS, last)
            while end < last and (end + 1 - first) * anchors[end] <= most_pairs:
                end += 1
            chunks.append(_make_chunk(slice(first, end), start, blocks, anchors[first], anchors[end - 1], window))
            first = end
    return chunks


def _make_chunk(
    block_slice: slice, document_start: int, blocks: Blocks, first_anchor: int, last_anchor: int, window: int | None
) -> _Chunk:
    """Describe a chunk of blocks between two anchors."""
    device = blocks.anchors_A.device
    lowest = 0 if window is None else max(0, first_anchor - window + 1)
    # In a sliding layer every slot has its own lower edge, so no token is common.
    num_common = first_anchor if window is None else 0
    positions = torch.arange(lowest + num_common, last_anchor, device=device)
    hidden = None
    if len(positions):
        slots = torch.arange(1 if window is None else blocks.block_size, device=device)[:, None]
        anchors = blocks.anchors_A[block_slice, None, None]
        same_document = torch.ones((), dtype=torch.bool, device=device)
        hidden = ~sees_context(anchors, slots, positions, same_document, window)
    tokens = slice(document_start + lowest, document_start + last_anchor)
    return _Chunk(block_slice.stop - block_slice.start, tokens, num_common, hidden)
