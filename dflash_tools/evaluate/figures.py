"""Figures of decoding: acceptance length and what stands behind it. The bonus token counts, the prefill's does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_tools.evaluate.decode import Answer, Cycle
from dflash_tools.evaluate.prompts import Prompt

CONTEXT_EDGES = (256, 1024, 4096, 16384)  # longest context of each group but the last. Unit: tokens
NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One prompt, decoded both ways.

    Attributes:
        prompt: What was decoded from.
        fast: With the drafter.
        plain: With the target alone.
    """

    prompt: Prompt
    fast: Answer
    plain: Answer


def acceptance_figures(cycles: Sequence[Cycle], num_draft_tokens: int) -> dict[str, Any]:
    """Sum up cycles.

    Args:
        cycles: Of any number of prompts.
        num_draft_tokens: Drafted tokens per cycle.

    Returns:
        ``acceptance_length``: tokens gained per target pass, the target's own (bonus) token included.
        ``accepted_draft_tokens``: the same without it. ``acceptance_by_position``: share of all cycles in which the
        drafted token at that place stands, so that the list sums to ``accepted_draft_tokens``.
        ``acceptance_histogram``: cycles by number of accepted tokens, 0 first.
    """
    accepted = np.array([cycle.num_accepted for cycle in cycles], dtype=np.int64)
    histogram = np.bincount(accepted, minlength=num_draft_tokens + 1)
    reached = histogram[::-1].cumsum()[::-1][1:]  # cycles with at least k accepted, k = 1 ..
    num_cycles = max(len(cycles), 1)
    return {
        "num_cycles": len(cycles),
        "acceptance_length": _ratio(sum(cycle.num_tokens for cycle in cycles), len(cycles)),
        "accepted_draft_tokens": _ratio(int(accepted.sum()), len(cycles)),
        "acceptance_by_position": [round(float(count) / num_cycles, 4) for count in reached],
        "acceptance_histogram": histogram.tolist(),
    }


def bootstrap_interval(decoded: Sequence[Decoded], *, seed: int = 0, level: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the pooled acceptance length, by drawing prompts with replacement.

    Prompts are drawn, not cycles: cycles of one answer are alike.

    Args:
        decoded: At least two prompts with cycles; else None is returned.
        seed: Of the draws.
        level: Share of resamples inside the interval.
    """
    tokens = np.array([sum(cycle.num_tokens for cycle in one.fast.cycles) for one in decoded], dtype=np.float64)
    cycles = np.array([len(one.fast.cycles) for one in decoded], dtype=np.float64)
    tokens, cycles = tokens[cycles > 0], cycles[cycles > 0]
    if len(cycles) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(cycles), (NUM_RESAMPLES, len(cycles)))
    lengths = tokens[drawn].sum(axis=1) / cycles[drawn].sum(axis=1)
    low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
    return round(float(low), 4), round(float(high), 4)


def speed_figures(decoded: Sequence[Decoded]) -> dict[str, Any]:
    """Tokens per second with and without the drafter, after the prefill, and the time of a cycle's two halves."""
    cycles = [cycle for one in decoded for cycle in one.fast.cycles]
    fast = _ratio(sum(cycle.num_tokens for cycle in cycles), sum(one.fast.decode_seconds for one in decoded))
    alone = sum(cycle.num_tokens for one in decoded for cycle in one.plain.cycles)
    plain = _ratio(alone, sum(one.plain.decode_seconds for one in decoded))
    return {
        "tokens_per_second": fast,
        "plain_tokens_per_second": plain,
        "speedup": _ratio(fast, plain),
        "draft_seconds_per_cycle": _ratio(sum(cycle.draft_seconds for cycle in cycles), len(cycles)),
        "target_seconds_per_cycle": _ratio(sum(cycle.target_seconds for cycle in cycles), len(cycles)),
    }


def by_kind(decoded: Sequence[Decoded], num_draft_tokens: int) -> list[dict[str, Any]]:
    """Acceptance and speed of each kind of prompt, in order of first appearance."""
    kinds = dict.fromkeys(one.prompt.kind for one in decoded)
    return [
        {"kind": kind, "num_prompts": len(group), **_group(group, num_draft_tokens)}
        for kind in kinds
        if (group := [one for one in decoded if one.prompt.kind == kind])
    ]


def by_context(decoded: Sequence[Decoded], num_draft_tokens: int) -> list[dict[str, Any]]:
    """Acceptance by the length of the context that a cycle started from."""
    cycles = [cycle for one in decoded for cycle in one.fast.cycles]
    places = np.searchsorted(CONTEXT_EDGES, [cycle.start for cycle in cycles], side="left")
    lower = (1, *(edge + 1 for edge in CONTEXT_EDGES))
    return [
        {
            "min_tokens": lower[place],
            "max_tokens": CONTEXT_EDGES[place] if place < len(CONTEXT_EDGES) else None,
            **acceptance_figures([cycles[index] for index in np.flatnonzero(places == place)], num_draft_tokens),
        }
        for place in sorted(set(places.tolist()))
    ]


def by_prompt(decoded: Sequence[Decoded], num_draft_tokens: int) -> list[dict[str, Any]]:
    """One row per prompt, with its first divergence from plain decoding, if there is one."""
    return [
        {
            "prompt": one.prompt.name,
            "kind": one.prompt.kind,
            "num_prompt_tokens": len(one.prompt.token_ids),
            "num_new_tokens": len(one.fast.token_ids),
            **_group([one], num_draft_tokens),
            "divergence": divergence(one),
        }
        for one in decoded
    ]


def divergence(one: Decoded) -> dict[str, Any] | None:
    """Find the first token that differs from plain decoding, with the lead of each side's choice; None if equal.

    The lead is that of the target's first choice over its second: where it is near 0, rounding decides.
    """
    fast, plain = one.fast, one.plain
    if fast.token_ids == plain.token_ids:
        return None
    pairs = zip(fast.token_ids, plain.token_ids, strict=False)
    shorter = min(len(fast.token_ids), len(plain.token_ids))
    at = next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    inside = at < shorter
    return {
        "position": at,
        "token": fast.token_ids[at] if inside else None,
        "plain_token": plain.token_ids[at] if inside else None,
        "gap": round(fast.gaps[at], 4) if inside else None,
        "plain_gap": round(plain.gaps[at], 4) if inside else None,
    }


def _group(group: Sequence[Decoded], num_draft_tokens: int) -> dict[str, Any]:
    cycles = [cycle for one in group for cycle in one.fast.cycles]
    speed = speed_figures(group)
    kept = ("tokens_per_second", "plain_tokens_per_second", "speedup")
    return acceptance_figures(cycles, num_draft_tokens) | {key: speed[key] for key in kept}


def _ratio(numerator: float, denominator: float) -> float:
    return round(float(numerator) / float(denominator), 6) if denominator else float("nan")
