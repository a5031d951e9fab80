"""Where a training figure and the true acceptance length part: the same drafter on other anchors and other text.

Four estimates in a row, each one step closer to decoding: uniform anchors on the data's text, as training measures;
the anchors that decoding would visit on that text; uniform anchors on the target's own text; decoding itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_tools.drafter.model import DrafterCache
from dflash_tools.evaluate.decode import Answer, Pair
from dflash_tools.evaluate.prompts import Prompt
from dflash_tools.evaluate.session import TargetSession

NUM_ANCHORS = 32  # uniform anchors per text
MAX_VISITS = 64  # anchors that a walk visits per text


@dataclass(slots=True)
class GapCounts:
    """Accepted drafted tokens of every block that was tried, by kind of anchor and text."""

    uniform_on_data: list[int] = field(default_factory=list)
    walk_on_data: list[int] = field(default_factory=list)
    uniform_on_own: list[int] = field(default_factory=list)

    def add(self, pair: Pair, prompt: Prompt, answer: Answer, num_draft_tokens: int, *, seed: int) -> None:
        """Try the drafter on the data's text and on the target's own.

        Args:
            pair: Target and drafter.
            prompt: A prompt; without a continuation only the target's own text is tried.
            answer: Its greedy answer, with the captured states.
            num_draft_tokens: Drafted tokens per block.
            seed: Of the uniform anchors.
        """
        first = len(prompt.token_ids)
        if prompt.continuation:
            text = [*prompt.token_ids, *prompt.continuation]
            states = TargetSession(pair.target, pair.drafter.config.target_layer_ids).prefill([text]).states[0]
            anchors = _uniform(first, len(text), num_draft_tokens, seed)
            self.uniform_on_data += accepted_at(pair, states, text, anchors, num_draft_tokens)
            self.walk_on_data += accepted_on_walk(pair, states, text, first, num_draft_tokens)
        text = [*prompt.token_ids, *answer.token_ids]
        anchors = _uniform(first, len(text), num_draft_tokens, seed)
        self.uniform_on_own += accepted_at(pair, torch.cat(answer.states), text, anchors, num_draft_tokens)

    def analysis(self, true_length: float, trained: float | None) -> dict[str, float | None]:
        """Put estimated and true acceptance lengths side by side.

        Args:
            true_length: Acceptance length of decoding.
            trained: What training estimated on held-out samples at this checkpoint, if known.

        Returns:
            Acceptance lengths, bonus token counted; a figure without text is None.
        """
        return {
            "estimated_in_training": trained,
            "uniform_anchors_on_data": _mean_length(self.uniform_on_data),
            "decode_anchors_on_data": _mean_length(self.walk_on_data),
            "uniform_anchors_on_own_text": _mean_length(self.uniform_on_own),
            "true": true_length,
        }


def accepted_at(
    pair: Pair, states_TKH: Tensor, token_ids: Sequence[int], anchors: Sequence[int], num_draft_tokens: int
) -> list[int]:
    """Count the drafted tokens that equal the text, for blocks at given anchors.

    Args:
        pair: Target and drafter.
        states_TKH: Captured states of the text, at least up to the last anchor.
        token_ids: The text.
        anchors: Positions in the text, ascending.
        num_draft_tokens: Drafted tokens per block.
    """
    cache = DrafterCache()
    return [_accepted(pair, cache, states_TKH, token_ids, anchor, num_draft_tokens) for anchor in anchors]


def accepted_on_walk(
    pair: Pair, states_TKH: Tensor, token_ids: Sequence[int], first: int, num_draft_tokens: int
) -> list[int]:
    """Count as ``accepted_at`` does, at the anchors that decoding would visit if the text were the target's own.

    Args:
        pair: Target and drafter.
        states_TKH: Captured states of the text.
        token_ids: The text.
        first: The first anchor: the first token of the answer.
        num_draft_tokens: Drafted tokens per block; a block that would pass the end of the text is left out.
    """
    cache, counts, anchor = DrafterCache(), list[int](), first
    while anchor + num_draft_tokens < len(token_ids) and len(counts) < MAX_VISITS:
        counts.append(_accepted(pair, cache, states_TKH, token_ids, anchor, num_draft_tokens))
        anchor += counts[-1] + 1
    return counts


def _accepted(
    pair: Pair, cache: DrafterCache, states_TKH: Tensor, token_ids: Sequence[int], anchor: int, num_drafted: int
) -> int:
    held = len(cache)
    if anchor > held:
        positions = torch.arange(held, anchor, device=pair.target.device)
        pair.drafter.append_context(cache, states_TKH[None, held:anchor], positions)
    drafted = pair.draft_logits(cache, token_ids[anchor], anchor, num_drafted).argmax(dim=-1).tolist()
    equal = np.array(drafted) == np.array(token_ids[anchor + 1 : anchor + 1 + num_drafted])
    return int(equal.cumprod().sum())


def _uniform(first: int, num_tokens: int, num_draft_tokens: int, seed: int) -> list[int]:
    anchors = np.arange(first, num_tokens - num_draft_tokens)
    if len(anchors) > NUM_ANCHORS:
        anchors = np.sort(np.random.default_rng(seed).choice(anchors, NUM_ANCHORS, replace=False))
    return [int(anchor) for anchor in anchors]


def _mean_length(counts: Sequence[int]) -> float | None:
    return round(float(np.mean(counts)) + 1.0, 4) if counts else None


def gap_steps(lengths: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Say what each step of the analysis changes, and by how much: rows of before, after and change."""
    steps = (
        ("estimated_in_training", "uniform_anchors_on_data", "fresh states instead of the store's; these prompts"),
        ("uniform_anchors_on_data", "decode_anchors_on_data", "anchors that decoding visits: after each rejection"),
        ("decode_anchors_on_data", "true", "the target's own text instead of the data's"),
        ("uniform_anchors_on_own_text", "true", "on its own text: anchors that decoding visits"),
    )
    return [
        {"before": first, "after": second, "change": what}
        for before, after, what in steps
        if (first := lengths[before]) is not None and (second := lengths[after]) is not None
    ]
