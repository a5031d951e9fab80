"""The target over one growing sequence, with a cache that gives back rejected tokens.

In shapes: T tokens of a pass, K captured layers, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_tools.errors import ConfigError
from dflash_tools.target.capture import Capture
from dflash_tools.target.load import Target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """What one forward of the target gives.

    Attributes:
        logits_TV: Logits of the tokens of the pass, in float32; only the last one's for a prefill.
        states_TKH: Captured states of the tokens; K = 0 where none were asked for.
    """

    logits_TV: Tensor
    states_TKH: Tensor


class TargetSession:
    """One sequence being decoded.

    A cache of keys and values can be cut back to any length. Recurrent states (linear attention, Mamba) cannot; for
    those the whole sequence is run again in every pass, which is exact and slow, and ``recomputes`` says so.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = ()) -> None:
        """Args: the target, and the layers whose states every pass returns, counted from 0."""
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._ids: list[int] = []
        self._cache: Any = _new_cache(target)
        self.recomputes = False

    def __len__(self) -> int:
        """Tokens that the session holds."""
        return len(self._ids)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Pass:
        """Run the prompt; the logits are those of its last token only. Shape: (1, V)."""
        result = self._forward(ids, last_only=True)
        self.recomputes = not _is_croppable(self._cache)
        if self.recomputes:
            self._cache = None
        return result

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> Pass:
        """Run tokens that follow those held. Shape of the logits: (len(ids), V)."""
        return self._forward(ids, last_only=False)

    def crop(self, num_tokens: int) -> None:
        """Keep the first tokens and forget the rest."""
        num_removed = len(self._ids) - num_tokens
        assert num_removed >= 0, "a session can only be cut back"
        # Counted from the end: the one form that all versions of transformers read alike; 0 would mean "all" to some.
        if num_removed and not self.recomputes:
            self._cache.crop(-num_removed)
        del self._ids[num_tokens:]

    def _forward(self, ids: Sequence[int], *, last_only: bool) -> Pass:
        self._ids += ids
        ran = self._ids if self._cache is None else list(ids)
        accepted = inspect.signature(self._target.model.forward).parameters
        # transformers 5.24 renamed the argument.
        cache_name = "cache" if "cache" in accepted else "past_key_values"
        options: dict[str, Any] = {cache_name: self._cache, "use_cache": self._cache is not None}
        if "logits_to_keep" in accepted:
            options["logits_to_keep"] = 1 if last_only else len(ids)
        ids_BT = torch.tensor([ran], device=self._target.device)
        with Capture(self._target, self._layer_ids) as capture:
            output = self._target.model(input_ids=ids_BT, **options)
        logits_TV = output.logits[0, -1 if last_only else -len(ids) :].float().to(self._target.device)
        if not self._layer_ids:
            return Pass(logits_TV=logits_TV, states_TKH=torch.empty(len(ids), 0, 0))
        return Pass(logits_TV=logits_TV, states_TKH=capture.states_BTKH[0, -len(ids) :])


def _new_cache(target: Target) -> Any:
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=target.parts.text_config)
    if any(cache.is_sliding):
        if not hasattr(cache, "activate_past_recording"):
            raise ConfigError(
                f"{target.identity.model}: its sliding-window layers cannot be cut back by this version of "
                "transformers; install transformers 5.24 or newer"
            )
        cache.activate_past_recording()
    return cache


def _is_croppable(cache: Any) -> bool:
    # Older versions of transformers do not say; there, plain key and value layers can be cut back.
    stated = getattr(cache, "is_croppable", None)
    return all(hasattr(layer, "keys") for layer in cache.layers) if stated is None else bool(stated)
