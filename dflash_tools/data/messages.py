"""One message of a conversation, in any of the spellings people use, to the spelling chat templates read."""

from typing import Any

from dflash_tools.data.sample import RowError
from dflash_tools.data.tool_calls import read_function_value, read_tool_calls

_ROLES = {
    "user": ("user", "human", "prompter", "question"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "gemini", "claude", "chatbot"),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
}
ROLE_OF = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
# ShareGPT turns whose value is a call written as JSON.
_CALL_ROLES = ("function_call", "tool_call", "function-call")

_ROLE_KEYS = ("role", "from", "author", "sender")
_CONTENT_KEYS = ("content", "value", "text")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_FLAG_KEYS = ("weight", "train", "training", "trainable", "loss")
_PASSED_KEYS = ("name", "tool_call_id")
_CALL_KEYS = ("tool_calls", "function_call")
_KNOWN_KEYS = frozenset((*_ROLE_KEYS, *_CONTENT_KEYS, *_REASONING_KEYS, *_FLAG_KEYS, *_PASSED_KEYS, *_CALL_KEYS))

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning")


def normalise_message(raw: Any, number: int, notes: set[str]) -> tuple[dict[str, Any], bool]:
    """Read one message.

    Args:
        raw: The message as it stands in the row.
        number: Its position in the conversation, from 1.
        notes: Takes what was ignored.

    Returns:
        The message with ``role``, ``content`` and, if it has them, ``reasoning_content``, ``thinking`` (the same text:
        templates read one or the other), ``tool_calls``, ``name``, ``tool_call_id``; and whether its flags let it
        count in the loss.

    Raises:
        RowError: If it is no message, or its content is no text.
    """
    if not isinstance(raw, dict):
        raise RowError("bad_message", f"message {number} is {describe(raw)}, expected an object with role and content")
    role, is_call = _read_role(raw, number)
    message: dict[str, Any] = {"role": role}
    calls = _read_calls(raw, is_call, number)
    content, reasoning = _read_content(raw, number, has_calls=bool(calls)) if not is_call else ("", "")
    message["content"] = content
    for key in _REASONING_KEYS:
        if raw.get(key) and not reasoning:
            if not isinstance(raw[key], str):
                raise RowError("content_not_text", f"{key} of message {number} is {describe(raw[key])}, expected text")
            reasoning = raw[key]
    if reasoning:
        message["reasoning_content"] = message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    for key in _PASSED_KEYS:
        if raw.get(key) is not None:
            message[key] = raw[key]
    if not raw.keys() <= _KNOWN_KEYS:
        ignored = (key for key in raw.keys() - _KNOWN_KEYS if raw[key] not in (None, "", [], {}))
        notes.update(f"ignored message key {key}" for key in ignored)
    return message, _read_flags(raw, number)


def _read_role(raw: dict[str, Any], number: int) -> tuple[str, bool]:
    found = next((raw[key] for key in _ROLE_KEYS if raw.get(key) is not None), None)
    if isinstance(found, dict):  # author objects of chat exports
        found = found.get("role")
    if not isinstance(found, str):
        keys = ", ".join(sorted(raw)) or "no keys"
        raise RowError("bad_message", f"message {number} has {keys}; expected role and content, or from and value")
    name = found.strip().casefold()
    if name in _CALL_ROLES:
        return "assistant", True
    if name not in ROLE_OF:
        raise RowError("unknown_role", f"message {number} has role {found!r}; known are {', '.join(sorted(ROLE_OF))}")
    return ROLE_OF[name], False


def _read_calls(raw: dict[str, Any], is_call: bool, number: int) -> list[dict[str, Any]]:
    if is_call:
        value = next((raw[key] for key in _CONTENT_KEYS if raw.get(key) is not None), None)
        return read_function_value(value, number)
    if raw.get("tool_calls"):
        return read_tool_calls(raw["tool_calls"], number)
    if raw.get("function_call"):
        return read_function_value(raw["function_call"], number)
    return []


def _read_content(raw: dict[str, Any], number: int, *, has_calls: bool) -> tuple[str, str]:
    key = next((key for key in _CONTENT_KEYS if key in raw), None)
    content = raw[key] if key else None
    if isinstance(content, str):
        return content, ""
    if content is None:
        if has_calls:
            return "", ""
        raise RowError("content_missing", f"message {number} has {'null' if key else 'no'} content and no tool calls")
    if isinstance(content, list):
        return _join_parts(content, number)
    if isinstance(content, dict) and isinstance(content.get("parts"), list):  # chat exports
        return _join_parts(content["parts"], number)
    raise RowError("content_not_text", f"content of message {number} is {describe(content)}, expected text")


def _join_parts(parts: list[Any], number: int) -> tuple[str, str]:
    texts: list[str] = []
    reasoning: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if isinstance(part, dict):
            part = part.get(kind) if kind in _REASONING_PARTS else part.get("text")
        if kind not in (*_TEXT_PARTS, *_REASONING_PARTS):
            raise RowError(
                "content_part_unsupported", f"message {number} has a part of type {kind!r}; only text is read"
            )
        if not isinstance(part, str):
            raise RowError("content_not_text", f"a part of message {number} is {describe(part)}, expected text")
        (reasoning if kind in _REASONING_PARTS else texts).append(part)
    return "".join(texts), "".join(reasoning)


def _read_flags(raw: dict[str, Any], number: int) -> bool:
    counts = True
    for key in _FLAG_KEYS:
        flag = raw.get(key)
        if flag is None:
            continue
        if flag not in (0, 1):  # True and False are 1 and 0
            raise RowError("bad_flag", f"{key} of message {number} is {flag!r}; expected true, false, 0 or 1")
        counts = counts and bool(flag)
    return counts


def describe(value: Any) -> str:
    """Say what a JSON value is, for an error message."""
    if value is None:
        return "null"
    name = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return name.get(type(value), type(value).__name__)
