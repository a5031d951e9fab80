"""One raw row -> samples, or the reason why there are none."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from pydantic_core import from_json

from dflash_tools.data.encode import Encoded, TextEncoder
from dflash_tools.data.manifest import ResolvedData
from dflash_tools.data.raw import RawRow
from dflash_tools.data.sample import RowError, TokenSample, has_supervised_pair
from dflash_tools.data.shapes import Conversation, PlainText, TokenIds, read_shape
from dflash_tools.data.template import RESERVED, compile_template, mark_typed_tokens
from dflash_tools.data.text_split import split_text
from dflash_tools.data.tokenizer import control_tokens, template_sources
from dflash_tools.data.turns import Chat, MarkedText, control_token_pattern, find_document_end, find_supervised
from dflash_tools.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
        self._control_tokens = control_token_pattern(control_tokens(tokenizer))
        written_tokens = [_to_json(token)[1:-1] for token in control_tokens(tokenizer)]
        self._unusual = re.compile(f"{control_token_pattern(written_tokens).pattern}|{RESERVED.pattern}")
        self._templates = template_sources(tokenizer)
        _check_syntax(self._templates)
        self._document_ends: dict[str, str] = {}  # by template
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **data.chat_template_kwargs}
        self._num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1

    def read_many(self, rows: Sequence[tuple[RawRow, str]]) -> list[RowOutcome]:
        """Read rows, each with its source's ``loss_on``."""
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
        content = _parse(row, notes)
        shape = read_shape(content)
        if isinstance(shape, TokenIds):
            draft.conversation_id, encoded = self._check_token_ids(shape, loss_on)
            self._finish(draft, [encoded])
            return
        if isinstance(shape, PlainText):
            written = _to_json(shape.text)
            draft.is_plain = True
            is_typed = self._has_typed_tokens(written, notes)
            draft.texts = self._text_pieces(self._mark(shape.text) if is_typed else shape.text, notes)
        else:
            notes |= shape.notes
            written = _to_json([shape.messages, shape.tools])
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
        if not self._unusual.search(written):
            return False
        if RESERVED.search(written):
            raise RowError("reserved_character", "the text holds a Unicode noncharacter, U+FDD0 to U+FDD2")
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
            affixes = len(self._encoder.prefix_ids) + len(self._encoder.suffix_ids)
            pieces = split_text(text, self._data.max_tokens - affixes, self._encoder.count_tokens)
            if len(pieces) > 1:
                notes.add("split")
        return [MarkedText(piece, ((0, len(piece)),)) for piece in pieces]

    def _chat_texts(self, conversation: Conversation, loss_on: str, notes: set[str]) -> list[MarkedText]:
        source = self._templates[conversation.tools is not None]
        if source is None:
            raise DataError(
                "the tokenizer has no chat template, but the data holds conversations; write the template that serving "
                "uses to a file and set data.chat_template"
            )
        if any("reasoning_content" in message for message in conversation.messages) and not _reads_reasoning(source):
            notes.add("reasoning not read by the template")
        template = compile_template(source)
        if source not in self._document_ends:
            self._document_ends[source] = find_document_end(template, self._variables, self._control_tokens)
        chat = Chat(conversation, template, self._variables, self._document_ends[source])
        if loss_on == "all":
            full = chat.render(len(chat.messages)).text
            return [MarkedText(full, ((0, len(full)),))]
        expand = self._data.history == "expand"
        texts = list(
            find_supervised(chat, self._control_tokens, expand=expand, is_beyond=self._encoder.fills, notes=notes)
        )
        if not any(text.spans for text in texts):
            raise RowError("no_supervised_turn", "no assistant turn that counts and can be told from its prompt")
        return texts

    def _check_token_ids(self, row: TokenIds, loss_on: str) -> tuple[str, Encoded]:
        ids = _int_array(row.input_ids, "input_ids")
        if len(ids) and (ids.min() < 0 or ids.max() >= self._num_ids):
            bad = ids[(ids < 0) | (ids >= self._num_ids)][0]
            raise RowError("bad_token_ids", f"input_ids holds {bad}; the tokenizer's ids are below {self._num_ids}")
        if row.loss_mask is None and loss_on != "all":
            raise RowError("bad_loss_mask", "input_ids without loss_mask; add one, or set loss_on = 'all'")
        mask = np.ones(len(ids), np.int64) if row.loss_mask is None else _int_array(row.loss_mask, "loss_mask")
        if len(mask) != len(ids):
            raise RowError("bad_loss_mask", f"loss_mask has {len(mask)} entries, input_ids has {len(ids)}")
        if not np.isin(mask, (0, 1)).all():
            raise RowError("bad_loss_mask", f"loss_mask holds {mask[~np.isin(mask, (0, 1))][0]}; expected 0 and 1")
        limit = self._data.max_tokens
        encoded = Encoded(ids[:limit].astype(np.int32), mask[:limit].astype(np.uint8), len(ids) > limit)
        return sha256(ids.astype("<i8").tobytes()).hexdigest()[:32], encoded

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
        too_long = any(reason == "too_long" for reason, _ in reasons)
        if not outcome.samples or (too_long and self._data.too_long == "error"):
            outcome.samples.clear()
            outcome.reason, outcome.detail = reasons[0]
            return
        outcome.notes.update(f"some turns left out: {reason}" for reason, _ in reasons)
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


def _key(samples: list[TokenSample]) -> int:
    digest = sha256()
    for sample in samples:
        digest.update(sample.input_ids.data)
        digest.update(sample.loss_mask.data)
    return int.from_bytes(digest.digest()[:8], "little")


def _check_syntax(templates: Sequence[str | None]) -> None:
    for source in templates:
        try:
            compile_template(source or "")
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"chat template, line {error.lineno}: {error.message}; correct the template") from None


def _parse(row: RawRow, notes: set[str]) -> Any:
    if row.damage:
        raise RowError("damaged_file", f"{row.damage}; the file's rows from here on are lost")
    if not isinstance(row.content, bytes):
        return row.content
    try:
        return from_json(row.content)
    except ValueError:
        pass
    # The strict parser refuses lone surrogates and deep nesting; the standard one says what is wrong.
    try:
        value = json.loads(row.content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"byte {error.start + 1} of the row is no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", str(error)) from None
    if _LONE_SURROGATE.search(_to_json(value)):
        notes.add("lone surrogates replaced")
        value = _replace_surrogates(value)
    return value


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    return value


def _int_array(values: list[Any], key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    reason = "bad_token_ids" if key == "input_ids" else "bad_loss_mask"
    if not values:
        raise RowError(reason, f"{key} is empty")
    if not all(type(value) in (int, bool) for value in values):
        raise RowError(reason, f"{key} holds something that is no integer")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise RowError(reason, f"{key} holds an integer beyond 64 bits") from None


def _reads_reasoning(template: str) -> bool:
    return "reasoning_content" in template or "thinking" in template
