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
from dflash_tools.evaluate.session import TargetSession
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
        target_seconds: Time of the target's pass; of a batch, an equal share.
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
        cycles: Passes of the target after the prefill; with the target alone, each gives one token.
        decode_seconds: Time after the prefill; of a batch, an equal share.
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


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence of a batch while it is decoded."""

    generator: torch.Generator
    tokens: list[int]
    gaps: list[float]
    pending: Tensor  # captured states that the drafter has not seen
    cache: DrafterCache = field(default_factory=DrafterCache)
    cycles: list[Cycle] = field(default_factory=list)
    states: list[Tensor] | None = None  # all of them, if they are to be returned


def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    pair: Pair | None = None,
    *,
    keep_states: bool = False,
) -> list[Answer]:
    """Decode prompts together, with a drafter or with the target alone.

    Args:
        target: The target.
        prompts: Tokens of each prompt; several only where ``session.batches_are_exact``.
        options: How to decode.
        pair: Target and drafter; None drafts nothing, so that a pass of the target gives one token.
        keep_states: Also return the captured states.

    Returns:
        One answer per prompt. Sampling draws from a generator of its own for each, so batches do not change it.
    """
    session = TargetSession(target, () if pair is None else pair.drafter.config.target_layer_ids)
    first = session.prefill(prompts)
    started = _now(target)
    rows = [_first_row(logits, states, options) for logits, states in zip(first.logits_BTV, first.states, strict=True)]
    if keep_states:
        for row in rows:
            row.states = [row.pending]
    active = _remaining(session, rows, options)
    while active:
        _cycle(target, session, active, options, pair)
        active = _remaining(session, active, options)
    seconds = (_now(target) - started) / len(rows)
    limit = options.max_new_tokens
    return [
        Answer(
            token_ids=row.tokens[:limit],
            gaps=row.gaps[:limit],
            cycles=row.cycles,
            decode_seconds=seconds,
            states=row.states or [],
            recomputed=session.recomputes,
        )
        for row in rows
    ]


def _first_row(logits_1V: Tensor, states_TKH: Tensor, options: DecodeOptions) -> _Row:
    generator = torch.Generator().manual_seed(options.seed)
    token = _choose(logits_1V[0], options, generator)
    return _Row(generator, [token], _gaps(logits_1V), pending=states_TKH)


def _remaining(session: TargetSession, rows: list[_Row], options: DecodeOptions) -> list[_Row]:
    going = [number for number, row in enumerate(rows) if not _ended(row.tokens, options)]
    if len(going) < len(rows):
        session.select(going)
    return [rows[number] for number in going]


def _cycle(target: Target, session: TargetSession, rows: list[_Row], options: DecodeOptions, pair: Pair | None) -> None:
    """Draft a block for every row, verify all blocks in one pass, and keep what stands."""
    starts, drafts, draft_seconds = session.lengths, [], []
    for row, start in zip(rows, starts, strict=True):
        before = _now(target)
        drafts.append(_draft(pair, row, start, options))
        draft_seconds.append(_now(target) - before)
    before = _now(target)
    verified = session.forward(
        [[row.tokens[-1], *draft.token_ids.tolist()] for row, draft in zip(rows, drafts, strict=True)]
    )
    verdicts = [
        _verify(logits_TV, draft, options, row.generator)
        for row, draft, logits_TV in zip(rows, drafts, verified.logits_BTV, strict=True)
    ]
    session.keep([verdict.num_accepted + 1 for verdict in verdicts], verified.logits_BTV.shape[1])
    target_seconds = (_now(target) - before) / len(rows)
    for number, (row, draft, verdict) in enumerate(zip(rows, drafts, verdicts, strict=True)):
        row.pending = verified.states[number][: verdict.num_accepted + 1]
        if row.states is not None:
            row.states.append(row.pending)
        accepted = draft.token_ids[: verdict.num_accepted].tolist()
        gained = _until_stop([*accepted, verdict.next_token], options)
        row.gaps += _gaps(verified.logits_BTV[number])[: len(gained)]
        row.tokens += gained
        row.cycles.append(
            Cycle(
                start=starts[number],
                num_accepted=min(verdict.num_accepted, len(gained)),
                num_tokens=len(gained),
                draft_seconds=draft_seconds[number],
                target_seconds=target_seconds,
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """Drafted tokens, on the CPU, and the distributions they were sampled from; None if chosen greedily."""

    token_ids: Tensor
    probs: Tensor | None = None


def _draft(pair: Pair | None, row: _Row, start: int, options: DecodeOptions) -> _Draft:
    if pair is None:
        return _Draft(torch.empty(0, dtype=torch.long))
    positions = torch.arange(len(row.cache), start, device=pair.target.device)
    pair.drafter.append_context(row.cache, row.pending[None], positions)
    logits_SV = pair.draft_logits(row.cache, row.tokens[-1], start, options.num_draft_tokens)
    if options.temperature == 0.0:
        return _Draft(logits_SV.argmax(dim=-1).cpu())
    probs = softmax_at(logits_SV, options.temperature)
    return _Draft(sample(probs, row.generator), probs)


def _verify(logits_TV: Tensor, draft: _Draft, options: DecodeOptions, generator: torch.Generator) -> Verdict:
    if options.temperature == 0.0:
        return verify_greedy(logits_TV, draft.token_ids)
    target_probs = softmax_at(logits_TV, options.temperature)
    draft_probs = target_probs[:0] if draft.probs is None else draft.probs
    return verify_sampled(target_probs, draft_probs, draft.token_ids, generator)


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
