"""The target over growing sequences, with a cache that gives back rejected tokens.

In shapes: B sequences, T tokens of a pass, K captured layers, H hidden size, V vocabulary.
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
        logits_BTV: Logits of the tokens of the pass, in float32; of a prefill only the last token's.
        states: Captured states of each sequence's tokens. Shape of each: (T, K, H), K = 0 where none were asked for.
    """

    logits_BTV: Tensor
    states: list[Tensor]


def batches_are_exact(target: Target) -> bool:
    """Tell whether several sequences can share a cache.

    Their rejected tokens stay in it, masked, so that a sequence has gaps. A sliding window counts them and recurrent
    states cannot leave them out; such targets decode one sequence at a time.
    """
    cache = _new_cache(target)
    linear = getattr(cache, "is_linear", [not hasattr(layer, "keys") for layer in cache.layers])
    return not any(cache.is_sliding) and not any(linear)


class TargetSession:
    """Sequences being decoded, in lockstep: every pass runs the same number of tokens of each.

    A cache of keys and values can be cut back to any length. Recurrent states (linear attention, Mamba) cannot; for
    those the whole sequence is run again in every pass, which is exact and slow, and ``recomputes`` says so.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = ()) -> None:
        """Args: the target, and the layers whose states every pass returns, counted from 0."""
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._sequences: list[list[int]] = []  # what each sequence holds
        self._mask_BC = torch.empty(0)  # columns of the cache that a sequence may see
        self._cache: Any = _new_cache(target)
        self._arguments = inspect.signature(target.model.forward).parameters
        self.recomputes = False

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence holds."""
        return [len(sequence) for sequence in self._sequences]

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Pass:
        """Run the prompts. Shape of the logits: (B, 1, V).

        Args:
            prompts: One; or several, where ``batches_are_exact``.
        """
        lengths = [len(prompt) for prompt in prompts]
        # Padding lies on the right: its queries see real tokens, so no row of the softmax is empty.
        padded = [[*prompt, *([0] * (max(lengths) - len(prompt)))] for prompt in prompts]
        self._sequences = [list(prompt) for prompt in prompts]
        columns = torch.arange(max(lengths), device=self._target.device)
        ends_B = torch.tensor(lengths, device=self._target.device)
        self._mask_BC = columns < ends_B[:, None]
        wanted, place_B = torch.unique(ends_B - 1, return_inverse=True)
        logits_BUV, states_BTKH = self._run(padded, [0] * len(padded), wanted)
        self.recomputes = not _is_croppable(self._cache)
        if self.recomputes:
            self._cache = None
        logits_B1V = logits_BUV[torch.arange(len(padded), device=place_B.device), place_B][:, None]
        return Pass(
            logits_BTV=logits_B1V,
            states=[states[:length] for states, length in zip(states_BTKH, lengths, strict=True)],
        )

    @torch.inference_mode()
    def forward(self, ids: Sequence[Sequence[int]]) -> Pass:
        """Run tokens that follow those held, equally many of each sequence. Shape of the logits: (B, T, V)."""
        starts, num_new = self.lengths, len(ids[0])
        for sequence, new in zip(self._sequences, ids, strict=True):
            sequence += new
        fresh = torch.ones(len(ids), num_new, dtype=torch.bool, device=self._target.device)
        self._mask_BC = torch.cat((self._mask_BC, fresh), dim=1)
        ran = self._sequences if self._cache is None else ids
        last = torch.arange(len(ran[0]) - num_new, len(ran[0]), device=self._target.device)
        logits_BTV, states_BTKH = self._run(ran, starts, last)
        return Pass(logits_BTV=logits_BTV, states=list(states_BTKH[:, -num_new:]))

    @torch.inference_mode()
    def keep(self, counts: Sequence[int], num_new: int) -> None:
        """Keep the first tokens of the latest pass and forget the rest.

        Args:
            counts: Tokens to keep of each sequence.
            num_new: Tokens of the pass.
        """
        num_columns = self._mask_BC.shape[1]
        for row, count in enumerate(counts):
            self._mask_BC[row, num_columns - num_new + count :] = False
            del self._sequences[row][len(self._sequences[row]) - num_new + count :]
        # What no sequence keeps is cut off; what only some keep stays, masked for the others.
        num_removed = num_new - max(counts)
        self._mask_BC = self._mask_BC[:, : num_columns - num_removed]
        # Counted from the end: the one form that all versions of transformers read alike; 0 would mean "all" to some.
        if num_removed and not self.recomputes:
            self._cache.crop(-num_removed)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the sequences only."""
        index = torch.tensor(rows, dtype=torch.long, device=self._target.device)
        self._sequences = [self._sequences[row] for row in rows]
        self._mask_BC = self._mask_BC[index]
        if not self.recomputes and rows:
            self._cache.batch_select_indices(index)

    def _run(self, ids: Sequence[Sequence[int]], starts: Sequence[int], wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model; gives logits at the ``wanted`` tokens of the pass, and states of all: (B, T, K, H)."""
        device, num_new = self._target.device, len(ids[0])
        # transformers 5.24 renamed the argument.
        cache_name = "cache" if "cache" in self._arguments else "past_key_values"
        options: dict[str, Any] = {cache_name: self._cache, "use_cache": self._cache is not None}
        if min(self.lengths) < self._mask_BC.shape[1]:  # without gaps the model's own mask and positions are right
            positions_B1 = torch.tensor(starts, device=device)[:, None]
            options["position_ids"] = positions_B1 + torch.arange(num_new, device=device)
            options["attention_mask"] = self._mask_BC.long()
        if "logits_to_keep" in self._arguments:
            options["logits_to_keep"] = wanted
        with Capture(self._target, self._layer_ids) as capture:
            logits = self._target.model(input_ids=torch.tensor(ids, device=device), **options).logits
        if "logits_to_keep" not in self._arguments:
            logits = logits[:, wanted]
        shape = (len(ids), num_new, 0, 0)
        states_BTKH = capture.states_BTKH if self._layer_ids else torch.empty(shape, device=device)
        return logits.float().to(device), states_BTKH


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
