"""The target's frozen parts that the drafter shares: embedding rows, head and final norm."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dflash_tools.errors import StoreError

FROZEN_FILE = "frozen.safetensors"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The target's output layer.

    Attributes:
        weight_VH: Rows of the vocabulary.
        bias_V: Bias, or None.
        scale: Logits are multiplied by this.
        softcap: Logits become ``softcap * tanh(logits / softcap)`` after scaling; None = not.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute logits in the dtype of the weights. Shape: (N, V)."""
        logits_NV = F.linear(hidden_NH.to(self.weight_VH.dtype), self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    def backward(self, slopes_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """Turn the gradient with respect to the logits into that of the rows. Shape: (N, H).

        Args:
            slopes_NV: Gradient with respect to the logits.
            logits_NV: What ``logits`` gave.
        """
        if self.softcap is not None:
            slopes_NV = slopes_NV * (1 - (logits_NV / self.softcap).square())
        gradient_NH = slopes_NV @ self.weight_VH
        return gradient_NH * self.scale if self.scale != 1.0 else gradient_NH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenTarget:
    """Frozen tensors of the target, as ``STORE/target/`` holds them.

    Attributes:
        embedding_VH: Embedding rows, used raw.
        head: Output layer; its weight is the embedding itself where the target ties them.
        norm_H: Weight of the final norm as a plain factor.
        norm_bias: Whether the final norm also has a bias.
        norm_eps: Epsilon of the final norm; None if the target's config names none for an RMS norm.
    """

    embedding_VH: Tensor
    head: Head
    norm_H: Tensor
    norm_bias: bool
    norm_eps: float | None

    @classmethod
    def load(
        cls, folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> "FrozenTarget":
        """Read ``frozen.safetensors`` and ``config.json``.

        Args:
            folder: ``STORE/target``.
            device: Where the tensors go.
            dtype: Their dtype; default as stored.

        Raises:
            StoreError: If a file is missing or unreadable, or a tensor is.
        """
        try:
            tensors = load_file(folder / FROZEN_FILE)
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise StoreError(f"{folder}: the target's frozen parts are unreadable ({error}); extract again") from None
        missing = sorted({"embed_tokens.weight", "norm.weight"} - set(tensors))
        if missing:
            raise StoreError(f"{folder / FROZEN_FILE}: {', '.join(missing)} missing; extract again")
        text: dict[str, Any] = config.get("text_config") or config
        embedding = tensors["embed_tokens.weight"]
        head = Head(
            weight_VH=tensors.get("lm_head.weight", embedding),
            bias_V=tensors.get("lm_head.bias"),
            scale=_logit_scale(text),
            softcap=text.get("final_logit_softcapping"),
        )
        eps = text.get("rms_norm_eps") or text.get("norm_eps")
        frozen = cls(
            embedding_VH=embedding,
            head=head,
            norm_H=tensors["norm.weight"],
            norm_bias="norm.bias" in tensors,
            norm_eps=eps,
        )
        return frozen.to(device, dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move all tensors; a tied head stays tied."""
        embedding = self.embedding_VH.to(device, dtype or self.embedding_VH.dtype)
        weight = self.head.weight_VH
        tied = weight is self.embedding_VH
        bias = self.head.bias_V
        head = replace(
            self.head,
            weight_VH=embedding if tied else weight.to(device, dtype or weight.dtype),
            bias_V=None if bias is None else bias.to(device, dtype or bias.dtype),
        )
        return replace(self, embedding_VH=embedding, head=head, norm_H=self.norm_H.to(device))


def _logit_scale(text: dict[str, Any]) -> float:
    # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
    return float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
