"""Rows of a data source -> the questions of a conversation; the answers in the row are left out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from dflash_tools.data import ResolvedData, RowResult
from dflash_tools.data.marks import RESERVED, token_pattern
from dflash_tools.data.parse import parse_row, to_json
from dflash_tools.data.raw import RawRow
from dflash_tools.data.read import num_copies
from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import Conversation, read_shape
from dflash_tools.data.sources import read_source

Message = dict[str, Any]

CUT_AT_TOOL = "ends before a tool result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked in a conversation.

    Attributes:
        turns: For each answer the messages that precede it and follow the answer before.
        tools: Tool definitions, or None.
        fingerprint: Of the content, 32 hex digits.
        notes: What a reader of the summary must know.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: list[Message] | None
    fingerprint: str
    notes: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation to be answered.

    Attributes:
        id: Names it by content; equal ones are numbered. 32 hex digits.
        source: File the row came from, as named in the manifest.
        source_row: Line number in JSON lines, else the position in the source; from 1.
        copy: Counts the prompts that a weight above 1 makes of one row, from 0.
        questions: What is asked.
    """

    id: str
    source: str
    source_row: int
    copy: int
    questions: Questions


class PromptReader:
    """Reads the prompts of every source, in order.

    Args:
        data: From resolve_data.
        control_tokens: Tokens that only the chat template may write.
    """

    def __init__(self, data: ResolvedData, control_tokens: set[str]) -> None:
        self._data = data
        self._written_tokens = token_pattern({to_json(token)[1:-1] for token in control_tokens})

    def read(self) -> Iterator[Prompt | RowResult]:
        """Yield each prompt, or a dropped row where there is none.

        Raises:
            DataError: If a file cannot be read.
        """
        seen: Counter[str] = Counter()
        for source in self._data.sources:
            for name, row in read_source(source):
                try:
                    questions = self._read_questions(row)
                    copies = self._num_copies(questions, source.weight, is_repeat=questions.fingerprint in seen)
                except RowError as error:
                    yield RowResult(
                        source=name,
                        source_row=row.source_row,
                        status="dropped",
                        reason=error.reason,
                        detail=error.detail,
                    )
                    continue
                for copy in range(copies):
                    number = f"{seen[questions.fingerprint]}:{questions.fingerprint}"
                    seen[questions.fingerprint] += 1
                    yield Prompt(
                        id=sha256(number.encode()).hexdigest()[:32],
                        source=name,
                        source_row=row.source_row,
                        copy=copy,
                        questions=questions,
                    )

    def _num_copies(self, questions: Questions, weight: float, *, is_repeat: bool) -> int:
        if is_repeat and self._data.duplicates == "drop":
            raise RowError("duplicate", "a row before this one asks the same")
        copies = num_copies(weight, questions.fingerprint)
        if not copies:
            raise RowError("not_sampled", f"left out by the source's weight {weight}")
        return copies

    def _read_questions(self, row: RawRow) -> Questions:
        notes: set[str] = set()
        conversation = _read_conversation(row, notes)
        notes |= conversation.notes
        turns, is_cut = split_turns(conversation.messages, conversation.counts)
        if is_cut:
            notes.add(CUT_AT_TOOL)
        written = to_json([turns, conversation.tools])
        self._look_for_typed_tokens(written, notes)
        return Questions(
            turns=tuple(tuple(turn) for turn in turns),
            tools=conversation.tools,
            fingerprint=sha256(written.encode()).hexdigest()[:32],
            notes=frozenset(notes),
        )

    def _look_for_typed_tokens(self, written: str, notes: set[str]) -> None:
        if RESERVED.search(written):
            raise RowError("reserved_character", "the text holds a Unicode noncharacter, U+FDD0 to U+FDD2")
        if self._written_tokens.search(written):
            if self._data.control_tokens == "drop":
                raise RowError("control_token_typed", "the content holds a control token of the tokenizer")
            notes.add(f"control tokens typed, read as {self._data.control_tokens}")


def split_turns(messages: Sequence[Message], counts: Sequence[bool]) -> tuple[list[list[Message]], bool]:
    """Cut a conversation where the target answers.

    An assistant's message after a question is left out: the target writes its own. One that does not count in the loss
    stays as context, and so does one before any question. Where the row holds no assistant's message at all, each
    question is answered. A tool result answers a call that the target may not make, so a conversation ends before the
    first one that follows an answer.

    Args:
        messages: The conversation.
        counts: Whether each message counts in the loss.

    Returns:
        For each answer the messages before it; and whether the conversation was cut before a tool result.

    Raises:
        RowError: If there is no question.
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    holds_answers = any(message["role"] == "assistant" for message in messages)
    for message, is_counted in zip(messages, counts, strict=True):
        if message["role"] == "assistant" and is_counted:
            if _asks(pending):
                turns.append(pending)
                pending = []
            if turns and not pending:
                continue
        if message["role"] == "tool" and turns and not pending:
            return turns, True
        pending.append(message)
        if not holds_answers and message["role"] == "user":
            turns.append(pending)
            pending = []
    if _asks(pending):
        turns.append(pending)
    if not turns:
        raise RowError("no_question", "the conversation holds no message of a user")
    return turns, False


def _asks(pending: Sequence[Message]) -> bool:
    return bool(pending) and pending[-1]["role"] in ("user", "tool")


def _read_conversation(row: RawRow, notes: set[str]) -> Conversation:
    content = parse_row(row, notes)
    try:
        shape = read_shape(content)
    except RowError as error:
        if error.reason != "unknown_shape" or not isinstance(content, dict):
            raise
        try:
            shape = read_shape({**content, "response": ""})  # a prompt without response
        except RowError:
            raise error from None
    if not isinstance(shape, Conversation):
        raise RowError("no_question", "the row holds text or token ids; expected messages, or a prompt")
    return shape
