"""Which characters of a rendered conversation the target itself would have written.

For each assistant turn the messages before it are rendered with the generation prompt: that is what serving sends. The
turn's own rendering must begin with it, and what follows, up to the end-of-turn token, is the target's part. If the
rendering of the whole conversation does not contain that same beginning, the template rewrites earlier turns (drops
their thinking, say), and the conversation becomes one sample per turn.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import Conversation
from dflash_tools.data.template import TEMPLATE_ERRORS, ChatTemplate, Rendering, Span
from dflash_tools.data.tool_calls import with_arguments_as_text

# A template writes this where a turn has no reasoning: the target did not.
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")


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

    def __init__(self, conversation: Conversation, template: ChatTemplate) -> None:
        self.messages = conversation.messages
        self.counts = conversation.counts
        self.template = template
        self._tools = conversation.tools

    def render(self, num_messages: int, *, prompt: bool = False) -> Rendering:
        """Render the first messages, with the generation prompt if ``prompt``.

        Raises:
            RowError: If the template refuses them.
        """
        messages = self.messages[:num_messages]
        try:
            return self.template.render(messages, self._tools, add_generation_prompt=prompt)
        except TEMPLATE_ERRORS as error:
            if isinstance(error, TypeError) and any("tool_calls" in message for message in messages):
                return self._render_with_text_arguments(num_messages, prompt)
            raise RowError("template_error", _first_line(error)) from None

    def _render_with_text_arguments(self, num_messages: int, prompt: bool) -> Rendering:
        # Some templates join arguments to text, so they take them only as JSON text.
        messages = with_arguments_as_text(self.messages)
        try:
            result = self.template.render(messages[:num_messages], self._tools, add_generation_prompt=prompt)
        except TEMPLATE_ERRORS as error:
            raise RowError("template_error", _first_line(error)) from None
        self.messages = messages
        return result


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def find_supervised(
    chat: Chat, *, expand: bool, is_beyond: Callable[[str], bool], notes: set[str]
) -> Iterator[MarkedText]:
    """Find what the target wrote in a conversation.

    Args:
        chat: The conversation.
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
        turn = _find_turn(chat, index, prompt, full)
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


def _find_turn(chat: Chat, index: int, prompt: str, full: Rendering) -> _Turn | None:
    own = full if index == len(chat.messages) - 1 else chat.render(index + 1)
    if not own.text.startswith(prompt):
        return None
    message = chat.messages[index]
    own_text = own.text.removesuffix(chat.template.document_end)
    start, end = len(prompt), _end_of_turn(own_text, len(prompt), chat.template.pattern)
    if not message.get("reasoning_content") and not message["content"].lstrip().startswith("<think>"):
        empty = _EMPTY_THINKING.match(own.text, start, end)
        start = empty.end() if empty else start
    spans = [(start, end)]
    if chat.template.is_marked:
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
