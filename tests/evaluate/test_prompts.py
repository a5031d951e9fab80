import json

import pytest
from make_store import make_store
from tiny_models import make_tiny_tokenizer

from dflash_tools.errors import DataError
from dflash_tools.evaluate.prompts import (
    BUILTIN_KINDS,
    Prompt,
    builtin_prompts,
    file_prompts,
    held_out_prompts,
    spread_over_kinds,
)
from dflash_tools.store import open_store


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_built_in_prompts_cover_every_kind_and_end_before_the_answer(tokenizer):
    prompts = builtin_prompts(tokenizer, {})
    assert tuple(dict.fromkeys(prompt.kind for prompt in prompts)) == BUILTIN_KINDS
    assert all(tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\n") for prompt in prompts)
    longest = {kind: max(len(p.token_ids) for p in prompts if p.kind == kind) for kind in BUILTIN_KINDS}
    assert longest["long_context"] > 4 * max(longest[kind] for kind in BUILTIN_KINDS if kind != "long_context")


def test_a_base_model_without_template_gets_the_bare_text(tmp_path):
    tokenizer = make_tiny_tokenizer(tmp_path, chat_template=None)
    prompt = builtin_prompts(tokenizer, {})[0]
    assert tokenizer.decode(prompt.token_ids).startswith("A bakery sells")


def write(tmp_path, *rows):
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_lines_hold_messages_sharegpt_turns_a_prompt_or_a_text(tokenizer, tmp_path):
    user = {"role": "user", "content": "the cat"}
    answered = [user, {"role": "assistant", "content": "sat"}]
    shared = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]
    path = write(
        tmp_path,
        {"messages": [user]},
        {"messages": answered, "kind": "cats"},
        {"conversations": shared},
        {"prompt": "the dog"},
        "",
        {"text": "the dog and the fox"},
    )
    prompts = file_prompts(path, tokenizer, {})
    assert prompts[0].token_ids == prompts[1].token_ids == prompts[2].token_ids
    assert [prompt.kind for prompt in prompts] == ["set", "cats", "set", "set", "set"]
    assert tokenizer.decode(prompts[3].token_ids) == "the dog"
    assert tokenizer.decode(prompts[4].token_ids + prompts[4].continuation) == "the dog and the fox"
    assert abs(len(prompts[4].token_ids) - len(prompts[4].continuation)) <= 1
    assert prompts[4].name == "set.jsonl:6"


def test_an_earlier_answer_is_part_of_the_prompt(tokenizer, tmp_path):
    turns = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "the dog"},
    ]
    (prompt,) = file_prompts(write(tmp_path, {"messages": turns}), tokenizer, {})
    assert "assistant\nsat<|im_end|>" in tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", r"set.jsonl:1: not valid JSON"),
        ("[1]", "found list"),
        ({"question": "why"}, "has question; expected messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown|role 'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message before"),
        ({"prompt": ""}, "too short"),
        ("", "holds no prompt"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tokenizer, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        file_prompts(write(tmp_path, row), tokenizer, {})


def test_a_data_manifest_gives_the_samples_of_extraction_cut_at_the_first_answer(tokenizer, tmp_path):
    write(tmp_path, {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]})
    manifest = tmp_path / "cats.toml"
    manifest.write_text('name = "cats"\n[[sources]]\npath = "set.jsonl"\n')
    (prompt,) = file_prompts(manifest, tokenizer, {})
    assert tokenizer.decode(prompt.token_ids) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.continuation).startswith("sat")
    assert prompt.kind == "set"


def test_held_out_samples_are_cut_at_their_first_supervised_token_or_in_half(tmp_path):
    store = open_store(make_store(tmp_path / "store", (9, 40, 17, 33), validation_rows=(1, 3), target=False))
    prompts = held_out_prompts(store, 16)
    assert sorted((len(p.token_ids), len(p.continuation)) for p in prompts) == [(11, 22), (13, 27)]
    assert len(held_out_prompts(store, 1)) == 1


def test_a_bound_on_prompts_takes_from_every_kind_in_turn():
    prompts = [Prompt(name=str(n), kind=kind, token_ids=(1,)) for n, kind in enumerate("aaabbc")]
    assert [p.name for p in spread_over_kinds(prompts, 4)] == ["0", "3", "5", "1"]
    assert spread_over_kinds(prompts, None) == prompts
