"""From files to results: order, accounting, repeats, policies, processes."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_tools.config import DataSection
from dflash_tools.data import 
from dflash_tools.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the lazy dog"}]}


def write_lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_supervised_tokens_are_the_reply_and_its_end(tokenizer, read_files, tmp_path):
    (result,) = read_files(write_lines(tmp_path / "a.jsonl", CHAT).parent, "a.jsonl")
    (sample,) = result.samples
    assert tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == "the lazy dog<|im_end|>"
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(CHAT["messages"], return_dict=False)


def test_every_row_ends_as_one_result_in_order(tokenizer, read_files, tmp_path):
    rows = [CHAT, {"text": "the cat sat"}, {"nothing": 1}, CHAT, {"text": "  "}]
    results = read_files(write_lines(tmp_path / "a.jsonl", *rows).parent, "a.jsonl")
    assert [result.source_row for result in results] == [1, 2, 3, 4, 5]
    assert [result.status for result in results] == ["kept", "kept", "dropped", "kept", "dropped"]
    assert [result.reason for result in results] == ["", "", "unknown_shape", "", "empty"]
    assert results[3].notes == ("duplicate",)


def test_strict_stops_at_the_first_bad_row_and_names_it(tokenizer, read_files, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: unknown_shape"):
        read_files(write_lines(tmp_path / "a.jsonl", CHAT, {"nothing": 1}, CHAT).parent, "a.jsonl", strict=True)


def test_a_reply_cut_at_max_tokens_keeps_its_mask_up_to_the_cut(tokenizer, read_files, tmp_path):
    """CT-04."""
    row = {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y" * 2000}]}
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    (result,) = read_files(write_lines(tmp_path / "a.jsonl", row).parent, "a.jsonl", max_tokens=512)
    (sample,) = result.samples
    assert len(sample.input_ids) == 512
    assert sample.loss_mask.sum() == 512 - len(prompt)
    assert result.notes == ("truncated",)


def test_processes_give_the_same_results_in_the_same_order(tokenizer, read_files, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_tools.data.read.BYTES_FOR_PROCESSES", 1)
    rows = [{"text": f"the cat {number} sat"} if number % 7 else {"bad": number} for number in range(1500)]
    write_lines(tmp_path / "a.jsonl", *rows)
    alone, together = read_files(tmp_path, "a.jsonl", num_processes=1), read_files(tmp_path, "a.jsonl", num_processes=2)
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
