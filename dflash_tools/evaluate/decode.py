"""The speculative loop: the drafter proposes a block, one target pass decides how much of it stands.

Source: docs/method.md, inference. The drafter's cache holds keys and values of verified tokens only; a block's are
never kept, so nothing is rolled back there. In shapes: S slots of a block, K captured layers, H hidden size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.model import DFlashDrafter, DrafterCache
from dflash_tools.evaluate.sampling import Verdict, sample, softmax_at, verify_greedy, verify_sampled
from dflash_tools.evaluate.session import Pass, TargetSession
from dflash_tools.target.load import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How an answer is decoded.

    Attributes:
        max_new_tokens: Length of an answer, the token from the prefill included.
        num_draft_tokens: Drafted tokens per cycle, at most ``block_size - 1``.
        temperature: 0 = greedy.
        stop_token_ids: An answer ends with the first of these, which it keeps.
        seed: Of sampling; each answer starts from it anew.
    """

    max_new_tokens: int
    num_draft_tokens: int
    temperature: float
    stop_token_ids: frozenset[int]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One drafted block and its verification.

    Attributes:
        start: Position of the anchor: context tokens before it.
        num_accepted: Drafted tokens that stand and are part of the answer (a stop token ends it).
        num_tokens: Tokens that the cycle gave: those, and the target's own unless a stop token came before it.
        draft_seconds: Time of the drafter.
        target_seconds: Time of the target's pass.
    """

    start: int
    num_accepted: int
    num_tokens: int
    draft_seconds: float
    target_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A decoded answer.

    Attributes:
        token_ids: Its tokens, the one from the prefill first.
        gaps: Lead of the target's first choice over its second where each token was chosen. Unit: logits.
        cycles: Empty for plain decoding.
        decode_seconds: Time after the prefill.
        states: Captured states of prompt and answer without its last tokens, as the drafter saw them; a list of
            (tokens, K, H) pieces.
        recomputed: Every pass of the target ran the whole sequence, since its cache cannot be cut back.
    """

    token_ids: list[int]
    gaps: list[float]
    cycles: list[Cycle]
    decode_seconds: float
    states: list[Tensor] = field(default_factory=list)
    recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """A target and a drafter that share its embedding and head."""

    target: Target
    drafter: DFlashDrafter
    head: Head

    @classmethod
    def of(cls, target: Target, drafter: DFlashDrafter) -> "Pair":
        """Put a drafter into the target's dtype and on its device."""
        text, bias = target.parts.text_config, getattr(target.head, "bias", None)
        scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
        head = Head(
            weight_VH=_tensor(target.head.weight),
            bias_V=None if bias is None else _tensor(bias),
            scale=scale,
            softcap=getattr(text, "final_logit_softcapping", None),
        )
        return cls(target=target, drafter=drafter.to(target.device, target.dtype), head=head)

    @torch.inference_mode()
    def draft_logits(self, cache: DrafterCache, anchor_id: int, start: int, num_draft_tokens: int) -> Tensor:
        """Draft one block: logits of slots 1 to ``num_draft_tokens``. Shape: (num_draft_tokens, V), float32.

        The block has one mask token per drafted token, as in serving engines, so fewer tokens are a shorter block.
        """
        ids = [anchor_id] + [self.drafter.config.mask_token_id] * num_draft_tokens
        ids_BS = torch.tensor([ids], device=self.target.device)
        hidden_BSH = self.drafter.draft(cache, ids_BS, start, _tensor(self.target.embedding.weight))
        # A target spread over devices may have its head elsewhere.
        logits_SV = self.head.logits(hidden_BSH[0, 1:].to(self.head.weight_VH.device))
        return logits_SV.float().to(self.target.device)


def decode_plain(target: Target, prompt_ids: Sequence[int], options: DecodeOptions) -> Answer:
    """Decode with the target alone, one token per pass."""
    session, generator = TargetSession(target), torch.Generator().manual_seed(options.seed)
    first = session.prefill(prompt_ids)
    started = _now(target)
    tokens, gaps = [_choose(first.logits_TV[0], options, generator)], _gaps(first.logits_TV)
    while not _ended(tokens, options):
        step = session.forward(tokens[-1:])
        tokens.append(_choose(step.logits_TV[0], options, generator))
        gaps += _gaps(step.logits_TV)
    return Answer(token_ids=tokens, gaps=gaps, cycles=[], decode_seconds=_now(target) - started)


def decode_speculative(
    pair: Pair, prompt_ids: Sequence[int], options: DecodeOptions, *, keep_states: bool = False
) -> Answer:
    """Decode with drafter and target.

    Args:
        pair: Target and drafter.
        prompt_ids: Tokens of the prompt.
        options: How to decode.
        keep_states: Also return the captured states.
    """
    target, layer_ids = pair.target, pair.drafter.config.target_layer_ids
    session, cache = TargetSession(target, layer_ids), DrafterCache()
    generator = torch.Generator().manual_seed(options.seed)
    first = session.prefill(prompt_ids)
    started = _now(target)
    tokens, gaps = [_choose(first.logits_TV[0], options, generator)], _gaps(first.logits_TV)
    cycles: list[Cycle] = []
    pending, kept = first.states_TKH, [first.states_TKH]
    while not _ended(tokens, options):
        start = len(session)
        cycle_started = _now(target)
        pair.drafter.append_context(cache, pending[None], torch.arange(len(cache), start, device=target.device))
        draft_logits = pair.draft_logits(cache, tokens[-1], start, options.num_draft_tokens)
        drafted, draft_probs = _draft(draft_logits, options, generator)
        drafted_at = _now(target)
        verified = session.forward([tokens[-1], *drafted.tolist()])
        verdict = _verify(verified, draft_probs, drafted, options, generator)
        session.crop(start + 1 + verdict.num_accepted)
        pending = verified.states_TKH[: verdict.num_accepted + 1]
        kept.append(pending)
        gained = _until_stop([*drafted.tolist()[: verdict.num_accepted], verdict.next_token], options)
        gaps += _gaps(verified.logits_TV)[: len(gained)]
        tokens += gained
        cycles.append(
            Cycle(
                start=start,
                num_accepted=min(verdict.num_accepted, len(gained)),
                num_tokens=len(gained),
                draft_seconds=drafted_at - cycle_started,
                target_seconds=_now(target) - drafted_at,
            )
        )
    limit = options.max_new_tokens
    return Answer(
        token_ids=tokens[:limit],
        gaps=gaps[:limit],
        cycles=cycles,
        decode_seconds=_now(target) - started,
        states=kept if keep_states else [],
        recomputed=session.recomputes,
    )


def _draft(logits: Tensor, options: DecodeOptions, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    if options.temperature == 0.0:
        return logits.argmax(dim=-1), None
    probs = softmax_at(logits, options.temperature)
    return sample(probs, generator), probs


def _verify(
    verified: Pass, draft_probs: Tensor | None, drafted: Tensor, options: DecodeOptions, generator: torch.Generator
) -> Verdict:
    if draft_probs is None:
        return verify_greedy(verified.logits_TV, drafted)
    target_probs = softmax_at(verified.logits_TV, options.temperature)
    return verify_sampled(target_probs, draft_probs, drafted, generator)


def _choose(logits_V: Tensor, options: DecodeOptions, generator: torch.Generator) -> int:
    if options.temperature == 0.0:
        return int(logits_V.argmax())
    return int(sample(softmax_at(logits_V[None], options.temperature), generator))


def _until_stop(tokens: list[int], options: DecodeOptions) -> list[int]:
    for position, token in enumerate(tokens):
        if token in options.stop_token_ids:
            return tokens[: position + 1]
    return tokens


def _ended(tokens: list[int], options: DecodeOptions) -> bool:
    return tokens[-1] in options.stop_token_ids or len(tokens) >= options.max_new_tokens


def _gaps(logits_TV: Tensor) -> list[float]:
    best_T2 = logits_TV.topk(2, dim=-1).values
    gaps: list[float] = (best_T2[:, 0] - best_T2[:, 1]).tolist()
    return gaps


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
