"""The parts of a drafter layer. Weights keep their own dtype (float32 masters); arithmetic is in the input's dtype.

In shapes: N rows, T context tokens, A blocks, S slots, H hidden size, I MLP width, Q query heads, G key/value heads,
D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_tools.drafter.config import DrafterConfig

# attend(q_ASQD, context_k_TGD, context_v_TGD, block_k_ASGD, block_v_ASGD, slides) -> ASQD
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


class Linear(nn.Module):
    """A product without bias, in the input's dtype."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis and scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of the rotary embedding at some positions. Shape of each: (positions..., 1, D)."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate heads, halves against each other. Shape: (positions..., heads, D)."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def make_rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Compute the rotary embedding; frequencies and angles are in float32 whatever the dtype of the model.

    Args:
        positions: Absolute positions in the document. Any shape.
        head_dim: Width of a head.
        theta: Base of the frequencies.
        dtype: Dtype of the result.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].to(torch.float32) / theta**exponents
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


class Attention(nn.Module):
    """Block queries over context and block; both halves share the key and value projections."""

    def __init__(self, config: DrafterConfig, *, slides: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.slides = slides
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_width)
        self.k_proj = Linear(config.hidden_size, key_width)
        self.v_proj = Linear(config.hidden_size, key_width)
        self.o_proj = Linear(query_width, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Project context or block. Shape of x: (positions..., H); of the results: (positions..., G, D)."""
        keys = self.k_norm(self._heads(self.k_proj(x)))
        return rotation.apply(keys), self._heads(self.v_proj(x))

    def forward(self, x_ASH: Tensor, rotation: Rotation, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Attend from every slot. Returns: Shape (A, S, H)."""
        queries = rotation.apply(self.q_norm(self._heads(self.q_proj(x_ASH))))
        keys, values = self.keys_and_values(x_ASH, rotation)
        mixed = attend(queries, *context_kv, keys, values, self.slides)
        output_ASH: Tensor = self.o_proj(mixed.flatten(-2))
        return output_ASH

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DecoderLayer(nn.Module):
    """A pre-norm layer over the block; the context enters as keys and values only, and without input_layernorm."""

    def __init__(self, config: DrafterConfig, *, slides: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, slides=slides)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_ASH: Tensor, rotation: Rotation, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Run attention and MLP with their residuals. Returns: Shape (A, S, H)."""
        x_ASH = x_ASH + self.self_attn(self.input_layernorm(x_ASH), rotation, context_kv, attend)
        mlp_ASH: Tensor = self.mlp(self.post_attention_layernorm(x_ASH))
        return x_ASH + mlp_ASH
