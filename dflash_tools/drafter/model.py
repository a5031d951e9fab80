"""The DFlash drafter: a few layers that draft a block of tokens at once from the target's hidden states.

In shapes: T tokens, K captured layers, H hidden size, A blocks, S slots, B sequences being decoded, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_tools.drafter.attention_dense import make_dense_attend
from dflash_tools.drafter.attention_flex import make_flex_attend
from dflash_tools.drafter.attention_split import make_split_attend
from dflash_tools.drafter.blocks import Blocks, Context
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.layers import Attend, DecoderLayer, Linear, RMSNorm, Rotation, make_rotation
from dflash_tools.errors import ConfigError

AttentionPath = Literal["dense", "split", "flex"]


def resolve_attention(setting: Literal["auto", "dense", "split", "flex"], device: torch.device) -> AttentionPath:
    """Choose the attention path: flex on CUDA, split elsewhere, unless one is named.

    Raises:
        ConfigError: If flex is asked for on a device where it has no gradient.
    """
    if setting == "auto":
        return "flex" if device.type == "cuda" else "split"
    if setting == "flex" and device.type != "cuda":
        raise ConfigError(
            f'hardware.attention = "flex" needs CUDA (flex attention has no gradient on {device.type}); use "auto"'
        )
    return setting


@dataclass(slots=True)
class DrafterCache:
    """Keys and values of the context in every layer, for decoding. Blocks never enter it, so nothing is rolled back.

    Attributes:
        keys: One tensor per layer. Shape: (B, T, key/value heads, head_dim).
        values: The same shapes.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        """Context tokens held."""
        return self.keys[0].shape[1] if self.keys else 0


class DFlashDrafter(nn.Module):
    """The drafter's trained weights; names as in DFlash checkpoints.

    Weights stay in their own dtype (float32 while training). The arithmetic runs in the dtype of the embedding it is
    given, so a bfloat16 embedding means matmuls in bfloat16 over float32 master weights, with or without autocast.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        layers = [DecoderLayer(config, slides=kind == "sliding_attention") for kind in config.layer_types]
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def init_weights(self, seed: int) -> None:
        """Fill with fresh weights: matrices normal with ``initializer_range``, norms one.

        Drawn on the CPU in the order of the state dict, so the same on every device.

        Args:
            seed: Fixes every value, whatever else has drawn random numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
                continue
            fresh = torch.empty(parameter.shape, dtype=torch.float32)
            fresh.normal_(std=self.config.initializer_range, generator=generator)
            with torch.no_grad():
                parameter.copy_(fresh)

    def forward(
        self,
        context: Context,
        blocks: Blocks,
        embedding_VH: Tensor,
        attention: AttentionPath = "dense",
        *,
        recompute_layers: bool = False,
    ) -> Tensor:
        """Compute the hidden states of every slot, after the final norm.

        Args:
            context: Hidden states of the documents of a batch.
            blocks: Blocks of the batch.
            embedding_VH: The target's embedding rows; their dtype is that of the arithmetic.
            attention: Which path computes the attention; all give the same result.
            recompute_layers: Keep only each layer's input and run the layer again in the backward pass: the same
                gradients for less memory and about a third more arithmetic.

        Returns:
            What the target's head reads. Shape: (A, S, H).
        """
        dtype = embedding_VH.dtype
        attend = self._make_attend(context, blocks, attention)
        context_TH = self.project_context(context.hidden_states_TKH.to(dtype))
        at_tokens = self._rotation(context.positions_T, dtype)
        at_slots = self._rotation(blocks.positions_AS, dtype)
        x_ASH = F.embedding(blocks.ids_AS, embedding_VH)

        def run_layer(layer: DecoderLayer, x_ASH: Tensor) -> Tensor:
            context_kv = layer.self_attn.keys_and_values(context_TH, at_tokens)
            output_ASH: Tensor = layer(x_ASH, at_slots, context_kv, attend)
            return output_ASH

        for layer in self.layers:
            if recompute_layers:
                # Nothing inside draws random numbers.
                x_ASH = checkpoint(run_layer, layer, x_ASH, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ASH = run_layer(layer, x_ASH)
        hidden_ASH: Tensor = self.norm(x_ASH)
        return hidden_ASH

    def project_context(self, hidden_states: Tensor) -> Tensor:
        """Fuse the captured layers: project first, norm second. Shape: (..., K, H) to (..., H)."""
        context: Tensor = self.hidden_norm(self.fc(hidden_states.flatten(-2)))
        return context

    @torch.no_grad()
    def append_context(self, cache: DrafterCache, hidden_states_BTKH: Tensor, positions_T: Tensor) -> None:
        """Add verified tokens to the context of sequences being decoded.

        Args:
            cache: Grows by T tokens.
            hidden_states_BTKH: Captured states of the tokens; their dtype is that of the arithmetic.
            positions_T: Positions of the tokens, the same for all sequences.
        """
        context_BTH = self.project_context(hidden_states_BTKH)
        rotation = self._rotation(positions_T.reshape(-1), context_BTH.dtype)
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_and_values(context_BTH, rotation)
            if index == len(cache.keys):
                cache.keys.append(keys)
                cache.values.append(values)
            else:
                cache.keys[index] = torch.cat((cache.keys[index], keys), dim=1)
                cache.values[index] = torch.cat((cache.values[index], values), dim=1)

    @torch.no_grad()
    def draft(self, cache: DrafterCache, ids_BS: Tensor, start: int, embedding_VH: Tensor) -> Tensor:
        """Compute the hidden states of one block per sequence; the cache stays as it is.

        Args:
            cache: Context at positions below ``start``.
            ids_BS: The last confirmed token and mask tokens.
            start: Position of the last confirmed token.
            embedding_VH: The target's embedding rows, in the dtype of the cache.

        Returns:
            What the target's head reads. Shape: (B, S, H).

        Raises:
            ValueError: If the cache does not end right before ``start``.
        """
        if len(cache) != start:
            raise ValueError(f"the cache holds {len(cache)} tokens, a block at position {start} needs {start}")
        positions_S = torch.arange(start, start + ids_BS.shape[1], device=ids_BS.device)
        rotation = self._rotation(positions_S, embedding_VH.dtype)
        attend = _make_cached_attend(start, self.config.sliding_window)
        x_BSH = F.embedding(ids_BS, embedding_VH)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BSH = layer(x_BSH, rotation, (keys, values), attend)
        hidden_BSH: Tensor = self.norm(x_BSH)
        return hidden_BSH

    def _make_attend(self, context: Context, blocks: Blocks, path: AttentionPath) -> Attend:
        window = self.config.sliding_window
        if path == "split":
            return make_split_attend(context, blocks, self.config.num_attention_heads, window)
        if path == "flex":
            return make_flex_attend(context, blocks, window)
        return make_dense_attend(context, blocks, window)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return make_rotation(positions, self.config.head_dim, self.config.rope_theta, dtype)


def _make_cached_attend(start: int, sliding_window: int | None) -> Attend:
    """Prepare attention of one block per sequence over its own cached context."""

    def attend(q_BSQD: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, slides: bool) -> Tensor:
        queries = q_BSQD.transpose(1, 2)
        keys = torch.cat((ck, bk), dim=1).transpose(1, 2)
        values = torch.cat((cv, bv), dim=1).transpose(1, 2)
        mask = None
        if slides:
            window = sliding_window or 0
            slots = torch.arange(q_BSQD.shape[1], device=q_BSQD.device)[:, None]
            positions = torch.arange(start + q_BSQD.shape[1], device=q_BSQD.device)
            visible = (positions <= start + slots) & (positions > start + slots - window)
            mask = torch.zeros(visible.shape, dtype=q_BSQD.dtype, device=q_BSQD.device)
            mask = mask.masked_fill(~visible, -math.inf)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2)

    return attend
