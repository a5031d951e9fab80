"""Where a transformers model keeps its text backbone, decoder layers, embedding, final norm and head.

The rule, for any architecture: the backbone is the module that directly holds the input embedding; its layers are its
one list of ``num_hidden_layers`` modules; its final norm is its one child with a single vector of ``hidden_size``
weights, or the one after the layers if there are several. The self-test proves that the parts found are the right ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_tools.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The parts of a causal language model."""

    text_config: Any  # PreTrainedConfig of the text model
    backbone: nn.Module
    layers: nn.ModuleList
    embedding: nn.Module
    final_norm: nn.Module
    head: nn.Module


def find_parts(model: Any) -> Parts:
    """Find backbone, layers, embedding, final norm and head.

    Raises:
        ConfigError: If the model does not follow the rule above; its class is named.
    """
    text_config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise _refusal(model, "it has no input embedding or no output head")
    owners = [module for module in model.modules() if any(child is embedding for child in module.children())]
    num_layers, hidden_size = text_config.num_hidden_layers, text_config.hidden_size
    for backbone in owners:
        lists = [
            child for child in backbone.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers
        ]
        if len(lists) == 1:
            norm = _final_norm(backbone, lists[0], hidden_size)
            if norm is None:
                raise _refusal(model, f"{type(backbone).__name__} has no final norm over {hidden_size} values")
            return Parts(
                text_config=text_config,
                backbone=backbone,
                layers=lists[0],
                embedding=embedding,
                final_norm=norm,
                head=head,
            )
    raise _refusal(model, f"no module beside its input embedding holds a list of {num_layers} decoder layers")


def _final_norm(backbone: nn.Module, layers: nn.ModuleList, hidden_size: int) -> nn.Module | None:
    children = list(backbone.children())
    norms = [child for child in children if _is_norm(child, hidden_size)]
    if len(norms) > 1:
        position = next(i for i, child in enumerate(children) if child is layers)
        norms = [child for child in children[position + 1 :] if _is_norm(child, hidden_size)]
    return norms[0] if len(norms) == 1 else None


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.shape == (hidden_size,) and not list(module.children())


def _refusal(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"target.model: {type(model).__name__} cannot be used as a target: {reason}. "
        "Supported are decoder-only models of transformers (docs/extraction.md, Architectures)"
    )
