"""What a row holds: a conversation, plain text, or token ids; in any of the layouts people use."""

from dataclasses import dataclass, field
from typing import Any

from dflash_tools.data.messages import describe, normalise_message
from dflash_tools.data.sample import RowError
from dflash_tools.data.tool_calls import parse_json_if_text, read_tools

_CONVERSATION_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_PROMPT_KEYS = ("prompt", "instruction", "question", "query")
_RESPONSE_KEYS = ("response", "completion", "output", "answer")
_SYSTEM_KEYS = ("system", "system_prompt")
_EXPECTED = (
    "expected messages, conversations, text, prompt and response, or input_ids and loss_mask (docs/data.md lists all)"
)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages in the spelling chat templates read.

    Attributes:
        messages: ``role``, ``content`` and what else a message has.
        counts: Whether each message counts in the loss, if it is an assistant's.
        tools: Tool definitions, or None.
        notes: What was ignored.
    """

    messages: list[dict[str, Any]]
    counts: tuple[bool, ...]
    tools: list[dict[str, Any]] | None = None
    notes: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Text without turns."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """A row that is tokenised already; ``loss_mask`` is None if the row has none.

    Rows of one ``conversation_id`` fall on the same side of the validation split; None = a row of its own.
    """

    input_ids: list[Any]
    loss_mask: list[Any] | None
    conversation_id: str | None = None


def read_shape(row: Any) -> Conversation | PlainText | TokenIds:
    """Find out what a row holds.

    A row with several layouts is read as the first of: token ids, conversation, prompt and response, text.

    Raises:
        RowError: If it is in no known layout, or breaks the layout it is in.
    """
    if isinstance(row, list):
        row = _unwrap(row)
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"the row is {describe(row)}, {_EXPECTED}")
    if row.get("input_ids") is not None:
        return _read_token_ids(row)
    key = _first_key(row, _CONVERSATION_KEYS)
    if key is not None:
        return _read_conversation(row, row[key], key)
    if _first_key(row, _PROMPT_KEYS) and _first_key(row, _RESPONSE_KEYS):
        return _read_pair(row)
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise RowError("content_not_text", f"text is {describe(row['text'])}")
        return PlainText(text=row["text"])
    raise RowError("unknown_shape", f"the row has {', '.join(sorted(row)) or 'no keys'}; {_EXPECTED}")


def _unwrap(row: list[Any]) -> Any:
    """Read a list as the row it wraps, or as the messages of a conversation."""
    is_row = len(row) == 1 and isinstance(row[0], dict) and not {"role", "from"} & row[0].keys()
    return row[0] if is_row else {"messages": row}


def _first_key(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if row.get(key) is not None), None)


def _read_token_ids(row: dict[str, Any]) -> TokenIds:
    for key in ("input_ids", "loss_mask"):
        if row.get(key) is not None and not isinstance(row[key], list):
            raise RowError("bad_token_ids", f"{key} is {describe(row[key])}, expected a list of integers")
    named = row.get("conversation_id")
    return TokenIds(
        input_ids=row["input_ids"],
        loss_mask=row.get("loss_mask"),
        conversation_id=named if isinstance(named, str) else None,
    )


def _read_conversation(row: dict[str, Any], raw_messages: Any, key: str) -> Conversation:
    raw_messages = parse_json_if_text(raw_messages)
    if not isinstance(raw_messages, list) or not raw_messages:
        found = "empty" if raw_messages == [] else describe(raw_messages)
        raise RowError("bad_message", f"{key} is {found}, expected a list of messages")
    notes: set[str] = set()
    pairs = [normalise_message(raw, number, notes) for number, raw in enumerate(raw_messages, start=1)]
    messages, counts = [message for message, _ in pairs], [flag for _, flag in pairs]
    system = _first_key(row, _SYSTEM_KEYS)
    if system is not None and isinstance(row[system], str) and row[system] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row[system]})
        counts.insert(0, True)
    tools = read_tools(row.get("tools") if row.get("tools") is not None else row.get("functions"))
    return Conversation(messages=messages, counts=tuple(counts), tools=tools, notes=notes)


def _read_pair(row: dict[str, Any]) -> Conversation:
    """Read prompt and response: two texts, or two lists of messages that follow each other."""
    prompt, response = row[_first_key(row, _PROMPT_KEYS) or ""], row[_first_key(row, _RESPONSE_KEYS) or ""]
    if isinstance(prompt, str) and isinstance(row.get("input"), str) and row["input"]:
        prompt = f"{prompt}\n\n{row['input']}"
    messages = _as_messages(prompt, "user") + _as_messages(response, "assistant")
    return _read_conversation(row, messages, "prompt and response")


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]
