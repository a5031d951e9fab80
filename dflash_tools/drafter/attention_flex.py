"""The attention path for GPUs: flex attention over a block mask made from the laws of visibility.

Sorted anchors make most tiles of the mask wholly visible or wholly hidden, and hidden tiles are skipped. Lengths are
filled up to a multiple of a tile, so few shapes are compiled.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_tools.drafter.blocks import Blocks, Context
from dflash_tools.drafter.layers import Attend
from dflash_tools.drafter.visibility import sees_context, sees_slot

TILE = 128


@cache
def _compiled(function: Any) -> Any:
    # Not at import: the compiler alone takes seconds to load.
    return torch.compile(function, dynamic=True)


def make_flex_attend(context: Context, blocks: Blocks, sliding_window: int | None) -> Attend:
    """Prepare attention for one batch: compiled on CUDA, the same mask without compilation elsewhere.

    Args:
        context: Documents of the batch.
        blocks: Blocks of the batch.
        sliding_window: Window of the sliding layers.
    """
    full = _make_mask(context, blocks, None)
    sliding = None if sliding_window is None else _make_mask(context, blocks, sliding_window)
    run: Any = _compiled(flex_attention) if blocks.anchors_A.is_cuda else flex_attention

    def attend(q_ASQD: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, slides: bool) -> Tensor:
        mask = sliding if slides and sliding is not None else full
        num_queries, num_keys = mask.seq_lengths
        queries = _heads_first(q_ASQD.flatten(0, 1), num_queries)
        keys = _heads_first(torch.cat((ck, bk.flatten(0, 1))), num_keys)
        values = _heads_first(torch.cat((cv, bv.flatten(0, 1))), num_keys)
        mixed: Tensor = run(queries, keys, values, block_mask=mask, enable_gqa=True)
        num_slots = q_ASQD.shape[0] * q_ASQD.shape[1]
        return mixed[0].transpose(0, 1)[:num_slots].reshape(q_ASQD.shape)

    return attend


def _heads_first(x: Tensor, length: int) -> Tensor:
    """Fill up to a length and move heads to the front: (N, heads, D) to (1, heads, length, D)."""
    return F.pad(x, (0, 0, 0, 0, 0, length - len(x))).transpose(0, 1)[None]


def _make_mask(context: Context, blocks: Blocks, window: int | None) -> BlockMask:
    """Make the mask over context tokens followed by all slots. Rows that only fill a tile see nothing and give 0."""
    num_blocks, block_size = blocks.ids_AS.shape
    num_tokens, num_slots = len(context.positions_T), num_blocks * block_size
    num_queries, num_keys = _whole_tiles(num_slots), _whole_tiles(num_tokens + num_slots)
    device = blocks.anchors_A.device
    slot_blocks = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
    slot_offsets = torch.arange(block_size, device=device).repeat(num_blocks)

    def per_query(values: Tensor, filling: int) -> Tensor:
        return F.pad(values, (0, num_queries - num_slots), value=filling)

    def per_key(of_tokens: Tensor, of_slots: Tensor, filling: int) -> Tensor:
        return F.pad(torch.cat((of_tokens, of_slots)), (0, num_keys - num_tokens - num_slots), value=filling)

    # The mask reads tensors only: a length that changes from batch to batch would be compiled in.
    query_blocks, query_offsets = per_query(slot_blocks, -1), per_query(slot_offsets, 0)
    query_anchors = per_query(blocks.anchors_A[slot_blocks], 0)
    query_documents = per_query(blocks.document_ids_A[slot_blocks], -3)
    no_block, no_document = torch.full_like(context.positions_T, -2), torch.full_like(slot_blocks, -2)
    key_blocks, key_offsets = per_key(no_block, slot_blocks, -2), per_key(no_block, slot_offsets, 0)
    key_documents = per_key(context.document_ids_T, no_document, -2)
    key_positions = per_key(context.positions_T, no_document, 0)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = query_documents[query] == key_documents[key]
        same_block = query_blocks[query] == key_blocks[key]
        offset = query_offsets[query]
        in_context = sees_context(query_anchors[query], offset, key_positions[key], same_document, window)
        return in_context | (same_block & sees_slot(offset, key_offsets[key], window))

    make: Any = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    mask: BlockMask = make(mask_mod, None, None, num_queries, num_keys, device=device, BLOCK_SIZE=TILE)
    return mask


def _whole_tiles(length: int) -> int:
    # At least two: a length of one tile would be compiled apart.
    return max(2, -(-length // TILE)) * TILE
