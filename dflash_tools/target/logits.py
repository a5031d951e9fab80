"""From the last layer's output to logits, with the target's own scale and cap."""

import torch
from torch import Tensor

from dflash_tools.target.load import Target


def logits_of(target: Target, last_hidden_state: Tensor) -> Tensor:
    """Final norm, head, and what the config adds: Cohere's and Granite's scale, Gemma's soft-cap.

    Args:
        target: A loaded target.
        last_hidden_state: Output of the last decoder layer, before the final norm. Shape: (..., H).

    Returns:
        Logits. Shape: (..., V).
    """
    text = target.parts.text_config
    logits: Tensor = target.head(target.final_norm(last_hidden_state))
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    cap = getattr(text, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits
