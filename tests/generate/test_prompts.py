"""What is asked: rows of any layout become turns of questions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.config import DataSection
from dflash_tools.data import RowResult, resolve_data
from dflash_tools.data.sample import RowError
from dflash_tools.generate.prompts import CUT_AT_TOOL, PromptReader, split_turns


def read(path, **options):
    data = resolve_data(DataSection(sources=(str(path),), **options), path.parent)
    return list(PromptReader(data, {"<|im_start|>", "<|im_end|>"}).read())


def message(role, content="x"):
    return {"role": role, "content": content}


def roles(turns):
    return [[message["role"] for message in turn] for turn in turns]


def split(*names, kept=()):
    messages = [message(name) for name in names]
    return split_turns(messages, [position not in kept for position in range(len(names))])


def test_each_answer_in_the_row_is_left_out_and_asked_for():
    turns, is_cut = split("system", "user", "assistant", "user", "assistant")
    assert (roles(turns), is_cut) == ([["system", "user"], ["user"]], False)


def test_a_question_without_answer_is_asked():
    assert roles(split("user", "assistant", "user")[0]) == [["user"], ["user"]]


def test_without_any_answer_in_the_row_each_question_is_answered():
    assert roles(split("system", "user", "user")[0]) == [["system", "user"], ["user"]]
    assert roles(split("user", "user", "assistant")[0]) == [["user", "user"]]


def test_several_messages_of_one_answer_are_one_answer():
    assert roles(split("user", "assistant", "assistant", "user", "assistant")[0]) == [["user"], ["user"]]


def test_an_assistant_before_any_question_stays_as_context():
    assert roles(split("assistant", "user", "assistant")[0]) == [["assistant", "user"]]


def test_an_answer_that_does_not_count_stays_as_context():
    turns, _ = split("user", "assistant", "user", "assistant", kept=(1,))
    assert roles(turns) == [["user", "assistant", "user"]]


def test_a_conversation_ends_before_the_result_of_a_call_the_target_may_not_make():
    turns, is_cut = split("user", "assistant", "tool", "assistant", "user", "assistant")
    assert (roles(turns), is_cut) == ([["user"]], True)


def test_a_conversation_without_a_question_is_refused():
    with pytest.raises(RowError, match="no_question"):
        split("system", "assistant")


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.booleans()), max_size=12))
def test_every_turn_ends_with_a_question_and_no_message_changes_its_place(drawn):
    messages = [message(role, str(number)) for number, (role, _) in enumerate(drawn)]
    try:
        turns, _ = split_turns(messages, [flag for _, flag in drawn])
    except RowError:
        assert not any(role in ("user", "tool") for role, _ in drawn) or drawn[-1][0] in ("system", "assistant")
        return
    assert all(turn[-1]["role"] in ("user", "tool") for turn in turns)
    numbers = [int(message["content"]) for turn in turns for message in turn]
    assert numbers == sorted(set(numbers))
    assert all(message in messages for turn in turns for message in turn)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi"},
        {"instruction": "hi"},
        {"prompt": "hi", "response": "hello"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": [{"role": "user", "content": "hi"}]},
    ],
)
def test_every_layout_of_a_question_is_read(write_prompts, row):
    (prompt,) = read(write_prompts(row))
    assert prompt.questions.turns == (({"role": "user", "content": "hi"},),)


def test_rows_without_a_question_are_dropped_with_their_reason(write_prompts):
    dropped = read(write_prompts({"foo": 1}, {"text": "the fox"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}))
    assert all(isinstance(row, RowResult) for row in dropped)
    assert [(row.source_row, row.reason) for row in dropped] == [
        (1, "unknown_shape"),
        (2, "no_question"),
        (3, "no_question"),
    ]


def test_the_id_depends_on_the_questions_alone_and_counts_equal_ones(write_prompts):
    first = {"prompt": "hi", "response": "hello"}
    prompts = read(write_prompts(first, {"prompt": "ho"}, {"prompt": "hi", "response": "other"}))
    again = read(write_prompts({"prompt": "ho"}, first))
    assert prompts[0].questions.fingerprint == prompts[2].questions.fingerprint
    assert len({prompt.id for prompt in prompts}) == 3
    assert [prompt.id for prompt in again] == [prompts[1].id, prompts[0].id]


def test_equal_prompts_are_dropped_on_request(write_prompts):
    kept, dropped = read(write_prompts({"prompt": "hi"}, {"prompt": "hi"}), duplicates="drop")
    assert kept.source_row == 1
    assert dropped.reason == "duplicate"


def test_a_weight_makes_several_prompts_of_a_row(write_prompts, tmp_path):
    write_prompts({"prompt": "hi"})
    manifest = tmp_path / "m.toml"
    manifest.write_text('name = "m"\n[[sources]]\npath = "prompts.jsonl"\nweight = 2.0\n')
    data = resolve_data(DataSection(manifest=str(manifest)), tmp_path)
    prompts = list(PromptReader(data, set()).read())
    assert [prompt.copy for prompt in prompts] == [0, 1]
    assert len({prompt.id for prompt in prompts}) == 2


def test_typed_control_tokens_are_noted_or_the_row_is_dropped(write_prompts):
    path = write_prompts({"prompt": "a <|im_end|> b"})
    (prompt,) = read(path)
    assert prompt.questions.notes == {"control tokens typed, read as text"}
    (dropped,) = read(path, control_tokens="drop")
    assert dropped.reason == "control_token_typed"


def test_a_cut_before_a_tool_result_is_noted(write_prompts):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = {"messages": [message("user"), call, message("tool"), message("assistant")]}
    (prompt,) = read(write_prompts(rows))
    assert prompt.questions.notes == {CUT_AT_TOOL}
