"""Tool calls and tool definitions: arguments are objects before a template sees them, whatever the row holds."""

import json
from typing import Any

from dflash_tools.data.sample import RowError


def read_tool_calls(raw: Any, number: int) -> list[dict[str, Any]]:
    """Read the ``tool_calls`` of a message.

    Args:
        raw: A list of calls, or the same as JSON text.
        number: Position of the message, from 1.

    Raises:
        RowError: If it is no list of calls.
    """
    calls = parse_json_if_text(raw)
    if not isinstance(calls, list):
        raise RowError("bad_tool_call", f"tool_calls of message {number} is no list")
    return [_read_call(call, number) for call in calls]


def read_function_value(raw: Any, number: int) -> list[dict[str, Any]]:
    """Read a call that is the whole value of a turn: an object, a list of them, or either as JSON text.

    Raises:
        RowError: If it is no call.
    """
    value = parse_json_if_text(raw)
    calls = value if isinstance(value, list) else [value]
    return [_read_call(call, number) for call in calls]


def _read_call(raw: Any, number: int) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_tool_call", f"a tool call of message {number} has no function name")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"]}}
    if isinstance(raw.get("id"), str):
        call["id"] = raw["id"]
    # A key that is absent stays absent: it is for the template to say whether it can do without.
    if "arguments" in function:
        call["function"]["arguments"] = _read_arguments(function["arguments"], number)
    return call


def _read_arguments(raw: Any, number: int) -> dict[str, Any]:
    """Decode arguments once; empty text and null are a call without arguments.

    Raises:
        RowError: If they are broken JSON, or no object.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw) if raw.strip() else {}
        except ValueError:
            raise RowError(
                "bad_tool_call", f"arguments of a tool call of message {number} are no valid JSON: {raw[:60]!r}"
            ) from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise RowError("bad_tool_call", f"arguments of a tool call of message {number} are {raw!r:.60}, no object")
    return raw


def read_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Read the tool definitions of a row: a list of schemas, or the same as JSON text; None or empty = no tools.

    Raises:
        RowError: If it is no list of objects.
    """
    tools = parse_json_if_text(raw)
    if tools is None or tools == "" or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("bad_tools", "tools is no list of tool definitions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def parse_json_if_text(raw: Any) -> Any:
    """Decode JSON text; anything else, and text that is no JSON, stays as it is."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def with_arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write arguments as JSON text, for templates that join them to other text."""
    return [
        {**message, "tool_calls": [_call_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if "arguments" not in function:
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
