"""One raw row -> samples, or the reason why there are none."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from dflash_tools.data.encode import Encoded, TextEncoder
from dflash_tools.data.manifest import KwargValue, ResolvedData
from dflash_tools.data.marks import RESERVED, mark_typed_tokens, token_pattern
from dflash_tools.data.parse import parse_row, to_json
from dflash_tools.data.raw import RawRow
from dflash_tools.data.sample import RowError, TokenSample, has_supervised_pair
from dflash_tools.data.shapes import Conversation, PlainText, TokenIds, read_shape
from dflash_tools.data.template import ChatTemplate
from dflash_tools.data.text_split import split_text
from dflash_tools.data.token_ids import check_token_ids
from dflash_tools.data.tokenizer import special_tokens, template_sources
from dflash_tools.data.turns import Chat, MarkedText, find_supervised
from dflash_tools.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class RowOutcome:
    """What became of a row, before sources and repeats are looked at; ``key`` is a hash of its samples, 64 bits."""

    samples: list[TokenSample] = field(default_factory=list)
    reason: str = ""
    detail: str = ""
    notes: set[str] = field(default_factory=set)
    key: int = 0


@dataclass(slots=True)
class _Draft:
    """A row between rendering and tokenising."""

    outcome: RowOutcome
    conversation_id: str
    texts: list[MarkedText]
    is_plain: bool


class RowReader:
    """Turns raw rows into samples; safe to pickle, so that worker processes can hold one.

    Args:
        data: The data settings.
        tokenizer: The target's tokenizer.

    Raises:
        DataError: If the chat template is no template.
    """

    def __init__(self, data: ResolvedData, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._data = data
        self._encoder = TextEncoder(tokenizer.backend_tokenizer, data.max_tokens)
        self._template, self._tools_template = load_templates(tokenizer, data.chat_template_kwargs)
        tokens = special_tokens(tokenizer) if self._template is None else self._template.control_tokens
        self._control_tokens = token_pattern(tokens)
        self._written_tokens = token_pattern({to_json(token)[1:-1] for token in tokens})
        self._num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1

    def read_many(self, rows: Sequence[tuple[RawRow, str]]) -> list[RowOutcome]:
        """Read rows, each with its source's ``loss_on``."""
        with _no_collection():
            return self._read_many(rows)

    def _read_many(self, rows: Sequence[tuple[RawRow, str]]) -> list[RowOutcome]:
        drafts = [self._draft(row, loss_on) for row, loss_on in rows]
        texts = [text for draft in drafts for text in draft.texts]
        encoded = iter(self._encoder.encode_many(texts))
        for draft in drafts:
            own = [next(encoded) for _ in draft.texts]
            if not draft.outcome.reason and own:
                self._finish(draft, own)
        return [draft.outcome for draft in drafts]

    def _draft(self, row: RawRow, loss_on: str) -> _Draft:
        draft = _Draft(RowOutcome(), "", [], is_plain=False)
        try:
            self._fill_draft(draft, row, loss_on)
        except RowError as error:
            draft.texts = []
            draft.outcome.reason = error.reason
            draft.outcome.detail = f"{row.place}: {error.detail}" if row.place else error.detail
        return draft

    def _fill_draft(self, draft: _Draft, row: RawRow, loss_on: str) -> None:
        notes = draft.outcome.notes
        content = parse_row(row, notes)
        shape = read_shape(content)
        if isinstance(shape, TokenIds):
            draft.conversation_id, encoded = check_token_ids(
                shape, self._num_ids, self._data.max_tokens, needs_mask=loss_on != "all"
            )
            self._finish(draft, [encoded])
            return
        if isinstance(shape, PlainText):
            written = to_json(shape.text)
            draft.is_plain = True
            is_typed = self._has_typed_tokens(written, notes)
            draft.texts = self._text_pieces(self._mark(shape.text) if is_typed else shape.text, notes)
        else:
            notes |= shape.notes
            written = to_json([shape.messages, shape.tools])
            if self._has_typed_tokens(written, notes):
                shape.messages, shape.tools = self._mark(shape.messages), self._mark(shape.tools)
            draft.texts = self._chat_texts(shape, loss_on, notes)
        draft.conversation_id = sha256(written.encode()).hexdigest()[:32]

    def _has_typed_tokens(self, written: str, notes: set[str]) -> bool:
        """Look for control tokens that someone typed.

        Args:
            written: The content as JSON text: one search covers every string in it.
            notes: Takes what was found.

        Raises:
            RowError: If there are any and the policy drops such rows, or the text holds a reserved character.
        """
        if RESERVED.search(written):
            raise RowError("reserved_character", "the text holds a Unicode noncharacter, U+FDD0 to U+FDD2")
        if not self._written_tokens.search(written):
            return False
        if self._data.control_tokens == "drop":
            raise RowError("control_token_typed", "the content holds a control token of the tokenizer")
        notes.add(f"control tokens typed, read as {self._data.control_tokens}")
        return True

    def _mark(self, value: Any) -> Any:
        return value if self._data.control_tokens == "token" else mark_typed_tokens(value, self._control_tokens)

    def _text_pieces(self, text: str, notes: set[str]) -> list[MarkedText]:
        if not text.strip():
            raise RowError("empty", "the text is empty")
        pieces = [text]
        if self._data.too_long == "split":
            room = self._data.max_tokens - len(self._encoder.prefix_ids) - len(self._encoder.suffix_ids)
            pieces = list(split_text(text, room, lambda piece: self._encoder.reach(piece, room)))
            if len(pieces) > 1:
                notes.add("split")
        return [MarkedText(piece, ((0, len(piece)),)) for piece in pieces]

    def _chat_texts(self, conversation: Conversation, loss_on: str, notes: set[str]) -> list[MarkedText]:
        template = self._template if conversation.tools is None else self._tools_template
        if template is None:
            raise DataError(
                "the tokenizer has no chat template, but the data holds conversations; write the template that serving "
                "uses to a file and set data.chat_template"
            )
        if any("reasoning_content" in message for message in conversation.messages) and not _reads_reasoning(
            template.source
        ):
            notes.add("reasoning not read by the template")
        chat = Chat(conversation, template)
        if loss_on == "all":
            full = chat.render(len(chat.messages)).text
            return [MarkedText(full, ((0, len(full)),))]
        expand = self._data.history == "expand"
        texts = list(find_supervised(chat, expand=expand, is_beyond=self._encoder.fills, notes=notes))
        if not any(text.spans for text in texts):
            raise RowError("no_supervised_turn", "no assistant turn that counts and can be told from its prompt")
        return texts

    def _finish(self, draft: _Draft, encoded: list[Encoded]) -> None:
        """Apply the length policy, and keep what can be trained on."""
        outcome = draft.outcome
        reasons: list[tuple[str, str]] = []
        for one in encoded:
            if draft.is_plain:
                one = self._with_affixes(one)
            if one.is_cut and self._data.too_long in ("drop", "error"):
                reasons.append(("too_long", f"more than max_tokens = {self._data.max_tokens} tokens"))
                continue
            if not has_supervised_pair(one.loss_mask):
                reasons.append(("too_few_supervised", "no two supervised tokens follow each other within max_tokens"))
                continue
            if one.is_cut:
                outcome.notes.add("truncated")
            outcome.samples.append(
                TokenSample(input_ids=one.input_ids, loss_mask=one.loss_mask, conversation_id=draft.conversation_id)
            )
        stops = [reason for reason in reasons if reason[0] == "too_long" and self._data.too_long == "error"]
        if stops or not outcome.samples:
            outcome.samples.clear()
            outcome.reason, outcome.detail = (stops or reasons)[0]
            return
        outcome.notes.update(f"some samples left out: {reason}" for reason, _ in reasons)
        outcome.key = _key(outcome.samples)

    def _with_affixes(self, text: Encoded) -> Encoded:
        prefix, suffix = self._encoder.prefix_ids, self._encoder.suffix_ids
        if not prefix and not suffix:
            return text
        # A text that begins with a BOS of its own, under control_tokens = "token", gets no second one.
        if list(text.input_ids[: len(prefix)]) == prefix:
            prefix = []
        ids = np.concatenate([np.array(prefix, np.int32), text.input_ids, np.array(suffix, np.int32)])
        limit = self._data.max_tokens
        return Encoded(
            ids[:limit].astype(np.int32), np.ones(min(len(ids), limit), np.uint8), text.is_cut or len(ids) > limit
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage collection run: rows make many small objects and no cycles; looking for some took a fifth more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _key(samples: list[TokenSample]) -> int:
    digest = sha256()
    for sample in samples:
        digest.update(sample.input_ids.data)
        digest.update(sample.loss_mask.data)
    return int.from_bytes(digest.digest()[:8], "little")


def load_templates(
    tokenizer: "PreTrainedTokenizerBase", kwargs: dict[str, KwargValue]
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Load the template for rows without tools, and the one for rows with tools."""
    plain, with_tools = template_sources(tokenizer)
    if plain is None or with_tools is None:
        return None, None
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **kwargs}
    special = special_tokens(tokenizer)
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} - special
    try:
        template = ChatTemplate(plain, variables, special, added)
        return template, template if with_tools == plain else ChatTemplate(with_tools, variables, special, added)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"chat template, line {error.lineno}: {error.message}; correct the template") from None


def _reads_reasoning(template: str) -> bool:
    return "reasoning_content" in template or "thinking" in template
