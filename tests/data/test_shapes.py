"""Every layout of a row, and what is wrong with a broken one."""

import json

import pytest

from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import Conversation, PlainText, TokenIds, read_shape

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def messages_of(row):
    shape = read_shape(row)
    assert isinstance(shape, Conversation)
    return shape.messages


def reason_of(row):
    with pytest.raises(RowError) as caught:
        read_shape(row)
    assert caught.value.detail
    return caught.value.reason


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "ChatGPT", "value": "hello"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"role": "model", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "bing", "text": "hello"}], "id": "x"},
        {"conversation": [{"from": "human", "value": "hi"}, {"from": "bard", "value": "hello"}]},
        {"messages": None, "conversations": TURNS},
        {"messages": [{"author": {"role": "user"}, "content": {"parts": ["hi"]}}, TURNS[1]]},
        {"prompt": "hi", "response": "hello"},
        {"instruction": "hi", "input": "", "output": "hello"},
        {"question": "hi", "answer": "hello"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"messages": TURNS, "text": "<user>hi"},
        TURNS,
        [{"messages": TURNS}],
    ],
)
def test_a_conversation_is_the_same_in_every_spelling(row):
    """DI-01, DI-02, DI-05."""
    assert messages_of(row) == TURNS


@pytest.mark.parametrize("alias", ["assistant", "GPT", "chatgpt", "bing", "bard", "model", "bot", " ai "])
def test_names_of_the_assistant(alias):
    assert messages_of({"messages": [{"role": alias, "content": "x"}]})[0]["role"] == "assistant"


def test_a_system_text_beside_the_turns_comes_first():
    assert messages_of({"system": "be brief", "messages": TURNS}) == [{"role": "system", "content": "be brief"}, *TURNS]
    with_own = [{"role": "system", "content": "own"}, *TURNS]
    assert messages_of({"system": "be brief", "messages": with_own}) == with_own


def test_an_instruction_and_its_input_are_one_question():
    row = {"instruction": "Translate", "input": "hi", "output": "hello"}
    assert messages_of(row)[0]["content"] == "Translate\n\nhi"


def test_text_and_token_ids():
    assert read_shape({"text": "hi"}) == PlainText(text="hi")
    assert read_shape({"input_ids": [1], "loss_mask": [1], "messages": TURNS}) == TokenIds(input_ids=[1], loss_mask=[1])


@pytest.mark.parametrize("parts", [["a", "b"], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_parts_of_a_content_are_joined(parts):
    """DI-10, DI-25."""
    assert messages_of({"messages": [{"role": "user", "content": parts}]})[0]["content"] == "ab"
    assert messages_of({"messages": [{"role": "user", "content": []}]})[0]["content"] == ""


def test_thinking_is_found_under_its_names():
    for key in ("reasoning_content", "reasoning", "thinking"):
        message = {"role": "assistant", "content": "x", key: "hm"}
        assert messages_of({"messages": [message]})[0]["reasoning_content"] == "hm"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]
    message = messages_of({"messages": [{"role": "assistant", "content": parts}]})[0]
    assert (message["content"], message["reasoning_content"]) == ("x", "hm")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (5, "not_an_object"),
        (None, "not_an_object"),
        ({}, "unknown_shape"),
        ({"foo": 1}, "unknown_shape"),
        ({"messages": []}, "bad_message"),
        ({"messages": "hi"}, "bad_message"),
        ({"messages": ["hello", None, *TURNS]}, "bad_message"),  # DI-04
        ({"messages": [{"text": "x"}]}, "bad_message"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"speaker": "x", "words": "y"}]}, "bad_message"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content_missing"),  # DI-11
        ({"messages": [{"role": "assistant"}]}, "content_missing"),
        ({"messages": [{"role": "user", "content": 42}]}, "content_not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "content_not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content_part_unsupported"),
        ({"text": 4}, "content_not_text"),
        ({"input_ids": "1 2"}, "bad_token_ids"),
        ({"messages": TURNS, "tools": 5}, "bad_tools"),
    ],
)
def test_a_broken_row_has_a_reason(row, reason):
    assert reason_of(row) == reason


def call_of(arguments, **more):
    call = {"id": "c1", "function": {"name": "mul", "arguments": arguments, **more}}
    return {"messages": [*TURNS[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a":3,"b":18}', {"a": 3, "b": 18}), ({"a": 3}, {"a": 3}), ("null", {}), (None, {}), ("", {}), ("{}", {})],
)
def test_arguments_are_decoded_once(arguments, expected):
    """DI-07, DI-08, DI-11: content may be null beside tool calls."""
    message = messages_of(call_of(arguments))[1]
    assert message["tool_calls"][0]["function"] == {"name": "mul", "arguments": expected}
    assert message["content"] == ""


@pytest.mark.parametrize("arguments", ["[1,2]", "{bad", "3", [1]])
def test_arguments_that_are_no_object_drop_the_row(arguments):
    """DI-08."""
    assert reason_of(call_of(arguments)) == "bad_tool_call"


def test_absent_arguments_stay_absent():
    """DI-08."""
    row = {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]}
    assert messages_of(row)[0]["tool_calls"] == [{"type": "function", "function": {"name": "f"}}]


def test_calls_in_older_spellings():
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    call = {"name": "f", "arguments": {"a": 1}}
    for message in (
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"from": "function_call", "value": json.dumps(call)},
    ):
        (read,) = messages_of({"messages": [message]})
        assert (read["role"], read["tool_calls"]) == ("assistant", expected)


def test_tools_may_be_text_and_bare():
    row = {"messages": TURNS, "tools": json.dumps([{"name": "f", "parameters": {}}])}
    shape = read_shape(row)
    assert shape.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert read_shape({"messages": TURNS, "tools": []}).tools is None
