"""From files to results: order, accounting, repeats, policies, processes."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import SMOLLM2, make_tiny_tokenizer

from dflash_tools.config import DataSection
from dflash_tools.data import choose_split, load_tokenizer, read_rows, resolve_data
from dflash_tools.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the lazy dog"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    return load_tokenizer(str(folder))


def write_lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, tokenizer, **settings):
    options = {key: settings.pop(key) for key in ("strict", "num_processes") if key in settings}
    section = DataSection(sources=(path.name,), **settings)
    return list(read_rows(resolve_data(section, path.parent), tokenizer, **options))


def test_the_supervised_tokens_are_the_reply_and_its_end(tokenizer, tmp_path):
    (result,) = read(write_lines(tmp_path / "a.jsonl", CHAT), tokenizer)
    (sample,) = result.samples
    assert tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == "the lazy dog<|im_end|>"
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(CHAT["messages"], return_dict=False)


def test_every_row_ends_as_one_result_in_order(tokenizer, tmp_path):
    rows = [CHAT, {"text": "the cat sat"}, {"nothing": 1}, CHAT, {"text": "  "}]
    results = read(write_lines(tmp_path / "a.jsonl", *rows), tokenizer)
    assert [result.source_row for result in results] == [1, 2, 3, 4, 5]
    assert [result.status for result in results] == ["kept", "kept", "dropped", "kept", "dropped"]
    assert [result.reason for result in results] == ["", "", "unknown_shape", "", "empty"]
    assert results[3].notes == ("duplicate",)


def test_strict_stops_at_the_first_bad_row_and_names_it(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: unknown_shape"):
        read(write_lines(tmp_path / "a.jsonl", CHAT, {"nothing": 1}, CHAT), tokenizer, strict=True)


def test_a_reply_cut_at_max_tokens_keeps_its_mask_up_to_the_cut(tokenizer, tmp_path):
    """CT-04."""
    row = {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y" * 2000}]}
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    (result,) = read(write_lines(tmp_path / "a.jsonl", row), tokenizer, max_tokens=512)
    (sample,) = result.samples
    assert len(sample.input_ids) == 512
    assert sample.loss_mask.sum() == 512 - len(prompt)
    assert result.notes == ("truncated",)


def test_the_python_reference_is_cut_at_paragraph_ends_with_a_real_tokenizer():
    section = DataSection(manifest="data_manifests/python-reference.toml")
    data = resolve_data(section, Path(__file__).parents[2])
    results = list(read_rows(data, load_tokenizer(**SMOLLM2)))
    samples = [sample for result in results for sample in result.samples]
    assert {result.status for result in results} == {"kept"}
    assert len(samples) > len(results)
    assert max(len(sample.input_ids) for sample in samples) <= 2048
    assert all(sample.loss_mask.all() for sample in samples)
    held_out = choose_split([sample.conversation_id for sample in samples], 0.1, 8)
    assert 8 <= held_out.sum() < len(samples) / 2


def test_processes_give_the_same_results_in_the_same_order(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_tools.data.read.BYTES_FOR_PROCESSES", 1)
    rows = [{"text": f"the cat {number} sat"} if number % 7 else {"bad": number} for number in range(1500)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    alone, together = read(path, tokenizer, num_processes=1), read(path, tokenizer, num_processes=2)
    assert len(alone) == len(together) == 1500
    for one, two in zip(alone, together, strict=True):
        assert (one.source_row, one.status, one.reason, one.notes) == (
            two.source_row,
            two.status,
            two.reason,
            two.notes,
        )
        for left, right in zip(one.samples, two.samples, strict=True):
            assert np.array_equal(left.input_ids, right.input_ids)
            assert np.array_equal(left.loss_mask, right.loss_mask)
            assert left.conversation_id == right.conversation_id
