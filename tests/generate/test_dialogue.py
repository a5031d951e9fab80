"""A conversation while it is answered: ids and mask exactly as they went over the wire."""

import pytest
from tiny_models import CHATML, make_tiny_tokenizer

from dflash_tools.config import DataSection
from dflash_tools.data import load_tokenizer, read_rows, resolve_data
from dflash_tools.errors import DataError
from dflash_tools.generate.dialogue import Answer, Dialogue
from dflash_tools.generate.encoder import PromptEncoder
from dflash_tools.generate.journal import to_line
from dflash_tools.generate.prompts import PromptReader

END = 2  # <|im_end|>
# Shows the thinking of the last turn only, as several families do.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('</think>')[-1] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def start(tmp_path, write_prompts):
    def begin(*questions, chat_template=CHATML, max_tokens=4096, **options):
        make_tiny_tokenizer(tmp_path / "tok", chat_template=chat_template)
        tokenizer = load_tokenizer(str(tmp_path / "tok"))
        row = {"messages": [{"role": "user", "content": question} for question in questions]}
        for place in range(len(questions) - 1, 0, -1):
            row["messages"].insert(place, {"role": "assistant", "content": "theirs"})
        data = resolve_data(DataSection(sources=(str(write_prompts(row)),), **options), tmp_path)
        encoder = PromptEncoder(data, tokenizer, max_tokens)
        (prompt,) = PromptReader(data, encoder.control_tokens).read()
        return Dialogue(prompt, encoder), tokenizer

    return begin


def ids(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_the_question_is_what_serving_sends(start):
    dialogue, tokenizer = start("hi")
    assert dialogue.question == ids(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_row_goes_on_over_turns_and_only_the_answers_count(start):
    dialogue, tokenizer = start("hi", "and")
    first = [*ids(tokenizer, "the fox"), END]
    asked = dialogue.question
    dialogue.take(Answer(first, "stop"))
    assert dialogue.question == [
        *asked,
        *first,
        *ids(tokenizer, "\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"),
    ]
    between = len(dialogue.question) - len(asked) - len(first)
    second = [*ids(tokenizer, "dog"), END]
    dialogue.take(Answer(second, "stop"))
    assert dialogue.question is None
    (row,) = dialogue.entry()["rows"]
    assert row["loss_mask"] == [0] * len(asked) + [1] * len(first) + [0] * between + [1] * len(second)
    assert [message["content"] for message in row["messages"]] == ["hi", "the fox", "and", "dog"]
    assert (row["finish_reasons"], row["truncated"]) == (["stop", "stop"], False)


def test_ids_that_no_tokenizer_would_choose_stay_as_they_were_generated(start):
    """Answers sampled token by token need not be what the tokenizer makes of their text."""
    dialogue, tokenizer = start("hi", "and")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert letters != ids(tokenizer, "the")
    dialogue.take(Answer([*letters, END], "stop"))
    # Serving sends the text again, tokenised anew: another beginning, so another row.
    dialogue.take(Answer([*letters, END], "stop"))
    first, second = dialogue.entry()["rows"]
    assert first["input_ids"][-4:] == [*letters, END]
    assert second["input_ids"][-4:] == [*letters, END]
    assert sum(second["loss_mask"]) == 4
    assert first["conversation_id"] == second["conversation_id"]
    assert first["id"] != second["id"]


def test_a_template_that_drops_earlier_thinking_gives_a_row_per_turn(start):
    dialogue, tokenizer = start("hi", "and", chat_template=FORGETFUL)
    thought = [*ids(tokenizer, "<think>hm</think>yes"), END]
    dialogue.take(Answer(thought, "stop"))
    assert "hm" not in tokenizer.decode(dialogue.question)
    dialogue.take(Answer(thought, "stop"))
    first, second = dialogue.entry()["rows"]
    assert "hm" in tokenizer.decode(first["input_ids"])
    assert sum(first["loss_mask"]) == sum(second["loss_mask"]) == len(thought)
    assert [message["content"] for message in second["messages"]][1] == "<think>hm</think>yes"


def test_a_cut_answer_is_marked_and_ends_the_conversation(start):
    dialogue, _ = start("hi", "and")
    dialogue.take(Answer([30, 31], "length"))
    entry = dialogue.entry()
    assert dialogue.question is None
    assert entry["ended_early"] == "truncated"
    assert entry["rows"][0]["truncated"]


def test_a_prompt_without_room_for_an_answer_is_a_problem(start):
    dialogue, _ = start("the quick brown fox " * 20, max_tokens=64)
    assert dialogue.question is None
    assert dialogue.problem.reason == "too_long"
    fitting, _ = start("hi", max_tokens=64)
    assert fitting.room == 64 - len(fitting.question)


def test_typed_control_tokens_cannot_forge_turns_but_those_of_the_target_are_its_own(start):
    """CT: control tokens typed inside content."""
    dialogue, tokenizer = start("a<|im_end|>b", "and")
    assert dialogue.question.count(END) == 1
    taken, _ = start("a<|im_end|>b", "and", control_tokens="token")
    assert taken.question.count(END) == 2
    dialogue.take(Answer([*ids(tokenizer, "yes"), END], "stop"))
    (first,) = dialogue.entry()["rows"]
    assert first["messages"][0]["content"] == "a<|im_end|>b"


def test_a_template_that_refuses_the_messages_is_a_problem_and_keeps_what_was_answered(start):
    strict = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + CHATML
    dialogue, _ = start("hi", "and", chat_template=strict)
    dialogue.take(Answer([30, END], "stop"))
    assert dialogue.question is None
    assert dialogue.entry()["ended_early"] == "template_error"
    assert len(dialogue.entry()["rows"]) == 1


def test_a_tokenizer_without_chat_template_is_refused(start):
    with pytest.raises(DataError, match=r"no chat template.*data\.chat_template"):
        start("hi", chat_template=None)


def test_extract_reads_the_same_ids_and_mask(start, tmp_path):
    dialogue, tokenizer = start("hi", "and")
    for _ in range(2):
        dialogue.take(Answer([40, 41, 42, END], "stop"))
    rows = dialogue.entry()["rows"]
    (tmp_path / "out.jsonl").write_bytes(b"".join(to_line(row) for row in rows))
    data = resolve_data(DataSection(sources=("out.jsonl",)), tmp_path)
    read = [sample for result in read_rows(data, tokenizer) for sample in result.samples]
    assert [sample.input_ids.tolist() for sample in read] == [row["input_ids"] for row in rows]
    assert [sample.loss_mask.tolist() for sample in read] == [row["loss_mask"] for row in rows]


def test_all_rows_of_a_conversation_fall_on_the_same_side_of_the_split(start, tmp_path):
    dialogue, tokenizer = start("hi", "and", chat_template=FORGETFUL)
    for _ in range(2):
        dialogue.take(Answer([*ids(tokenizer, "<think>hm</think>yes"), END], "stop"))
    rows = dialogue.entry()["rows"]
    (tmp_path / "out.jsonl").write_bytes(b"".join(to_line(row) for row in rows))
    data = resolve_data(DataSection(sources=("out.jsonl",)), tmp_path)
    names = {sample.conversation_id for result in read_rows(data, tokenizer) for sample in result.samples}
    assert len(rows) == 2
    assert len(names) == 1
