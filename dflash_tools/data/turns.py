"""Which characters of a rendered conversation the target itself would have written.

For each assistant turn the messages before it are rendered with the generation prompt: that is what serving sends. The
turn's own rendering must begin with it, and what follows, up to the end-of-turn token, is the target's part. If the
rendering of the whole conversation does not contain that same beginning, the template rewrites earlier turns (drops
their thinking, say), and the conversation becomes one sample per turn.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import Conversation
from dflash_tools.data.template import TEMPLATE_ERRORS, Rendering, Span, render
from dflash_tools.data.tool_calls import with_arguments_as_text

# A template writes this where a turn has no reasoning: the target did not.
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
_NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text, TYPED marks included, and the spans of it that are supervised. Unit: characters, half-open, ascending."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    own: Rendering  # the conversation up to and with this turn
    spans: tuple[Span, ...]
    end: int  # after the end-of-turn token


class Chat:
    """A conversation with the template that renders its prefixes."""

    def __init__(
        self, conversation: Conversation, template: jinja2.Template, variables: dict[str, Any], document_end: str
    ) -> None:
        self.document_end = document_end
        self.messages = conversation.messages
        self.counts = conversation.counts
        self._tools = conversation.tools
        self._template = template
        self._variables = variables

    def render(self, num_messages: int, *, prompt: bool = False) -> Rendering:
        """Render the first messages, with the generation prompt if ``prompt``.

        Raises:
            RowError: If the template refuses them.
        """
        messages = self.messages[:num_messages]
        try:
            return render(self._template, messages, self._tools, self._variables, add_generation_prompt=prompt)
        except TEMPLATE_ERRORS as error:
            if isinstance(error, TypeError) and any("tool_calls" in message for message in messages):
                return self._render_with_text_arguments(num_messages, prompt)
            raise RowError("template_error", _first_line(error)) from None

    def _render_with_text_arguments(self, num_messages: int, prompt: bool) -> Rendering:
        # Some templates join arguments to text, so they take them only as JSON text.
        messages = with_arguments_as_text(self.messages)
        try:
            result = render(
                self._template, messages[:num_messages], self._tools, self._variables, add_generation_prompt=prompt
            )
        except TEMPLATE_ERRORS as error:
            raise RowError("template_error", _first_line(error)) from None
        self.messages = messages
        return result


def find_document_end(template: jinja2.Template, variables: dict[str, Any], control_tokens: re.Pattern[str]) -> str:
    """Find what a template writes only after the last turn, such as an EOS behind the end-of-turn token.

    The target never emits it. It shows when a conversation is rendered with and without a further question: what both
    share ends with a whole end-of-turn token, and the shorter one goes on.
    """
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    try:
        short, long = (
            render(template, messages[:count], None, variables, add_generation_prompt=False).text for count in (2, 3)
        )
    except TEMPLATE_ERRORS:
        return ""
    shared = os.path.commonprefix([short, long])  # noqa: RUF071 - characters are what is wanted
    ends = [match.end() for match in control_tokens.finditer(short) if match.end() <= len(shared)]
    if not ends or shared == short or re.search("[bc]", control_tokens.sub("", short[ends[-1] :])):
        return ""
    return short[ends[-1] :].lstrip()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def control_token_pattern(tokens: list[str]) -> re.Pattern[str]:
    """Match any of the control tokens, the longest first; one character alone cannot be told from text."""
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NOTHING


def find_supervised(
    chat: Chat, control_tokens: re.Pattern[str], *, expand: bool, is_beyond: Callable[[str], bool], notes: set[str]
) -> Iterator[MarkedText]:
    """Find what the target wrote in a conversation.

    Args:
        chat: The conversation.
        control_tokens: Matches the tokenizer's control tokens.
        expand: Where the template rewrites earlier turns, give one text per turn; otherwise refuse the row.
        is_beyond: Tells whether a prompt fills a whole sample, so that nothing after it can be supervised.
        notes: Takes ``expanded`` and ``first turn not supervised``.

    Raises:
        RowError: If the template refuses the row, hides what the target wrote, or rewrites turns and must not.
    """
    full = chat.render(len(chat.messages))
    turns: list[_Turn] = []
    rewritten = False
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant" or not chat.counts[index]:
            continue
        prompt = _prompt_of(chat, index, notes)
        if prompt is None:
            continue
        if is_beyond(prompt):
            break
        turn = _find_turn(chat, index, prompt, full, control_tokens)
        if turn is None:
            if index == 0:
                notes.add("first turn not supervised")
                continue
            raise RowError(
                "template_hides_reply",
                f"message {index + 1} is not rendered as a continuation of the generation prompt {prompt[-40:]!r}, so "
                "what the target would write cannot be told; use token ids and a loss mask, or another template",
            )
        turns.append(turn)
        rewritten = rewritten or not full.text.startswith(turn.own.text[: turn.end])
    if not rewritten:
        yield MarkedText(full.text, tuple(span for turn in turns for span in turn.spans))
        return
    if not expand:
        raise RowError("history_rewritten", "the template renders earlier turns otherwise once later ones follow")
    notes.add("expanded")
    yield from (MarkedText(turn.own.text, turn.spans) for turn in turns)


def _prompt_of(chat: Chat, index: int, notes: set[str]) -> str | None:
    try:
        return chat.render(index, prompt=True).text
    except RowError:
        if index > 0:
            raise
        # Nothing precedes the first message, and most templates cannot render nothing.
        notes.add("first turn not supervised")
        return None


def _find_turn(chat: Chat, index: int, prompt: str, full: Rendering, control_tokens: re.Pattern[str]) -> _Turn | None:
    own = full if index == len(chat.messages) - 1 else chat.render(index + 1)
    if not own.text.startswith(prompt):
        return None
    message = chat.messages[index]
    own_text = own.text.removesuffix(chat.document_end)
    start, end = len(prompt), _end_of_turn(own_text, len(prompt), control_tokens)
    if not message.get("reasoning_content") and not message["content"].lstrip().startswith("<think>"):
        empty = _EMPTY_THINKING.match(own.text, start, end)
        start = empty.end() if empty else start
    spans = [(start, end)]
    if own.generated:
        spans = [(max(start, first), min(end, last)) for first, last in own.generated]
    return _Turn(own, tuple((first, last) for first, last in spans if first < last), end)


def _end_of_turn(text: str, start: int, control_tokens: re.Pattern[str]) -> int:
    """Find the end of what the target emits: after the last control token, or of the text where there is none."""
    end = len(text)
    for match in control_tokens.finditer(text, start):
        end = match.end()
    if text[end:].strip():
        end = len(text)
    if end == len(text):
        end = max(len(text.rstrip()), start)
    return end
