"""A tiny drafter and random batches for it."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_tools.drafter.anchors import draw_anchors
from dflash_tools.drafter.blocks import Blocks, Context, build_blocks, build_context
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.model import DFlashDrafter

VOCAB_SIZE = 61
MASK_TOKEN_ID = 60


def make_config(**changes) -> DrafterConfig:
    config = DrafterConfig(
        hidden_size=16,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        initializer_range=0.02,
        layer_types=("full_attention", "full_attention"),
        sliding_window=None,
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=(1, 3),
        num_target_layers=6,
    )
    return replace(config, **changes)


def make_sliding_config(window: int = 6) -> DrafterConfig:
    return make_config(layer_types=("full_attention", "sliding_attention"), sliding_window=window)


def make_drafter(config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> DFlashDrafter:
    """Weights large enough that every part matters, norm weights away from one."""
    model = DFlashDrafter(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(10)
    return model.to(dtype)


@dataclass
class Batch:
    input_ids: list[np.ndarray]
    loss_masks: list[np.ndarray]
    anchors: list[np.ndarray]
    context: Context
    blocks: Blocks
    embedding_VH: torch.Tensor
    head: Head


def make_batch(
    config: DrafterConfig,
    lengths=(20, 13),
    num_anchors: int = 5,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    gamma: float = 4.0,
    supervised_share: float = 1.0,
    padding: int = 0,
) -> Batch:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, MASK_TOKEN_ID, length).astype(np.int32) for length in lengths]
    masks = [(rng.random(length) < supervised_share).astype(np.uint8) for length in lengths]
    anchors = [draw_anchors(m, num_anchors, seed=seed, epoch=0, sample_id=str(i)) for i, m in enumerate(masks)]
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(
        sum(lengths) + padding, len(config.target_layer_ids), config.hidden_size, generator=generator, dtype=dtype
    )
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator, dtype=dtype)
    blocks = build_blocks(
        ids, masks, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id, gamma=gamma
    )
    return Batch(ids, masks, anchors, build_context(states, lengths), blocks, embedding, Head(weight_VH=embedding))


def with_states(context: Context, hidden_states_TKH: torch.Tensor) -> Context:
    return replace(context, hidden_states_TKH=hidden_states_TKH)
