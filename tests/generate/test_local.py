"""The target in this process: batching changes speed, not answers."""

import pytest
import torch

from dflash_tools.config import DataSection, SamplingSection, TargetSection
from dflash_tools.data import load_tokenizer, resolve_data
from dflash_tools.generate.dialogue import Dialogue
from dflash_tools.generate.encoder import PromptEncoder
from dflash_tools.generate.local import LocalWriter
from dflash_tools.generate.prompts import PromptReader
from dflash_tools.target.load import load_target

STOPS = (2, 40, 41, 42)  # several, so that a random model ends some answers early


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))


@pytest.fixture
def answer(target, tiny_target_dir, write_prompts):
    def run(*rows, token_budget=10_000, max_tokens=4096, **sampling):
        path = write_prompts(*rows)
        data = resolve_data(DataSection(sources=(str(path),)), path.parent)
        encoder = PromptEncoder(data, load_tokenizer(str(tiny_target_dir)), max_tokens)
        settings = SamplingSection(**{"max_new_tokens": 8, **sampling})
        writer = LocalWriter(target, STOPS, settings, token_budget)
        dialogues = (Dialogue(prompt, encoder) for prompt in PromptReader(data, encoder.control_tokens).read())
        batches = list(writer.answer_all(dialogues))
        done = sorted((dialogue for batch in batches for dialogue in batch), key=lambda one: one.prompt.source_row)
        return done, [len(batch) for batch in batches]

    return run


QUESTIONS = [{"prompt": "the fox " * count} for count in (1, 9, 3, 14, 2)]


def rows_of(dialogues):
    return [dialogue.entry()["rows"] for dialogue in dialogues]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(answer, temperature):
    together, sizes = answer(*QUESTIONS, temperature=temperature)
    alone, small_sizes = answer(*QUESTIONS, temperature=temperature, token_budget=1)
    assert max(sizes) == 5
    assert max(small_sizes) == 1
    assert rows_of(together) == rows_of(alone)


def test_greedy_answers_are_the_targets_likeliest_tokens(answer, target):
    (dialogue,), _ = answer({"prompt": "the lazy dog"}, temperature=0.0)[0], None
    (row,) = dialogue.entry()["rows"]
    prompt = row["loss_mask"].index(1)
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
    assert logits.argmax(dim=-1).tolist()[prompt - 1 : -1] == row["input_ids"][prompt:]


def test_an_answer_ends_with_the_first_stop_token_or_is_cut(answer):
    dialogues, _ = answer(*QUESTIONS, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=60)
    reasons = set()
    for dialogue in dialogues:
        (row,) = dialogue.entry()["rows"]
        written = row["input_ids"][row["loss_mask"].index(1) :]
        (reason,) = row["finish_reasons"]
        reasons.add(reason)
        stops = [place for place, token in enumerate(written) if token in STOPS]
        assert stops == ([len(written) - 1] if reason == "stop" else [])
        assert row["truncated"] == (reason == "length")
    assert "stop" in reasons


def test_later_turns_see_the_answer_before_them(answer):
    question = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "the"}]}
    question["messages"].insert(1, {"role": "assistant", "content": "theirs"})
    dialogues, _ = answer(*[question] * 6, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=80)
    two = [dialogue for dialogue in dialogues if dialogue.num_answers == 2]
    assert two
    for dialogue in two:
        last = dialogue.entry()["rows"][-1]
        assert "theirs" not in str(last["messages"])
        assert len(last["messages"]) == 4
    assert len({str(rows_of([dialogue])[0][0]["input_ids"]) for dialogue in dialogues}) > 1  # seeds of their own


def test_no_answer_is_longer_than_a_sample_may_be(answer):
    (dialogue,), _ = answer({"prompt": "hi"}, max_tokens=22, temperature=0.0)
    (row,) = dialogue.entry()["rows"]
    assert len(row["input_ids"]) <= 22
    assert row["truncated"] or row["input_ids"][-1] in STOPS


def test_a_prompt_too_long_comes_back_without_answer(answer):
    dialogues, sizes = answer({"prompt": "the fox " * 40}, {"prompt": "hi"}, max_tokens=40)
    assert [dialogue.num_answers for dialogue in dialogues] == [0, 1]
    assert sizes == [1, 1]
