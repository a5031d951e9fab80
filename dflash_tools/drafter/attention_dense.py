"""The reference attention path: one additive mask over all queries and all keys of the batch.

Plain and slow; every other path must equal it in outputs and gradients.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_tools.drafter.blocks import Blocks, Context
from dflash_tools.drafter.layers import Attend
from dflash_tools.drafter.visibility import sees_context, sees_slot


def make_dense_attend(context: Context, blocks: Blocks, sliding_window: int | None) -> Attend:
    """Prepare attention for one batch.

    Args:
        context: Documents of the batch.
        blocks: Blocks of the batch.
        sliding_window: Window of the sliding layers.
    """
    full = _mask(context, blocks, None)
    sliding = None if sliding_window is None else _mask(context, blocks, sliding_window)

    def attend(q_ASQD: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, slides: bool) -> Tensor:
        num_blocks, block_size, num_heads, head_dim = q_ASQD.shape
        keys = torch.cat((ck, bk.flatten(0, 1))).transpose(0, 1)[None]
        values = torch.cat((cv, bv.flatten(0, 1))).transpose(0, 1)[None]
        queries = q_ASQD.flatten(0, 1).transpose(0, 1)[None]
        visible = sliding if slides and sliding is not None else full
        # Additive, not boolean: some kernels ignore a boolean mask without a word.
        mask = torch.zeros(visible.shape, dtype=q_ASQD.dtype, device=q_ASQD.device)
        mask = mask.masked_fill(~visible, float("-inf"))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(num_blocks, block_size, num_heads, head_dim)

    return attend


def _mask(context: Context, blocks: Blocks, window: int | None) -> Tensor:
    """True where a slot sees a key: context tokens first, then all slots. Shape: (A * S, T + A * S)."""
    num_blocks, block_size = blocks.ids_AS.shape
    device = blocks.anchors_A.device
    offsets = torch.arange(block_size, device=device).repeat(num_blocks)[:, None]
    block_of_slot = torch.arange(num_blocks, device=device).repeat_interleave(block_size)[:, None]
    anchors, documents = blocks.anchors_A[block_of_slot], blocks.document_ids_A[block_of_slot]
    same_document = documents == context.document_ids_T
    in_context = sees_context(anchors, offsets, context.positions_T, same_document, window)
    in_block = (block_of_slot == block_of_slot.T) & sees_slot(offsets, offsets.T, window)
    return torch.cat((in_context, in_block), dim=1)
