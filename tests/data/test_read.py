"""From files to results: order, accounting, repeats, policies, processes."""

import copy
import json
import os
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest

from dflash_tools.config import DataManifest, DataSection, load_config
from dflash_tools.data import read_rows, resolve_data, sample_id
from dflash_tools.data.manifest import ResolvedSource
from dflash_tools.data.raw import RawRow
from dflash_tools.data.workers import read_in_processes
from dflash_tools.errors import ConfigError, DataError

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


class Fatal:
    """Ends the process that receives it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_that_is_gone_is_said_and_not_waited_for():
    source = ResolvedSource(name="a")
    chunks = iter([[(source, "a", RawRow(1, b"{}"))]])
    with pytest.raises(DataError, match="ended from outside"):
        list(read_in_processes(Fatal(), chunks, 2))


LONG = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the lazy dog " * 20}]}


def test_long_rows_are_dropped_or_stop_the_reading_if_wanted(read_files, tmp_path):
    write_lines(tmp_path / "a.jsonl", CHAT, LONG)
    kept, dropped = read_files(tmp_path, "a.jsonl", max_tokens=48, too_long="drop")
    assert (kept.status, dropped.reason) == ("kept", "too_long")
    with pytest.raises(DataError, match=r"a\.jsonl:2: too_long: more than max_tokens = 48.*raise data.max_tokens"):
        read_files(tmp_path, "a.jsonl", max_tokens=48, too_long="error")
    _, truncated = read_files(tmp_path, "a.jsonl", max_tokens=48, too_long="split")
    assert truncated.notes == ("truncated",)


def test_a_prompt_that_leaves_no_room_drops_the_row(read_files, tmp_path):
    """Drafting needs an anchor and one more supervised token."""
    (result,) = read_files(write_lines(tmp_path / "a.jsonl", LONG).parent, "a.jsonl", max_tokens=16)
    assert result.reason == "too_few_supervised"


def test_text_is_split_into_samples_of_one_conversation(read_files, tmp_path, tokenizer):
    text = "\n\n".join(f"the quick brown fox {number} jumps over" for number in range(40))
    (result,) = read_files(
        write_lines(tmp_path / "a.jsonl", {"text": text}).parent, "a.jsonl", max_tokens=64, too_long="split"
    )
    assert result.notes == ("split",)
    assert "".join(tokenizer.decode(sample.input_ids) for sample in result.samples) == text
    assert len({sample.conversation_id for sample in result.samples}) == 1
    assert max(len(sample.input_ids) for sample in result.samples) <= 64


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 5, 9], "loss_mask": [0, 1, 1]}, ""),
        ({"input_ids": [1, 5, 9], "loss_mask": [False, True, True]}, ""),
        ({"input_ids": [1, 5, 9], "loss_mask": [0, 1]}, "bad_loss_mask"),
        ({"input_ids": [1, 5, 9], "loss_mask": [0, 1, 2]}, "bad_loss_mask"),
        ({"input_ids": [1, 5, 9]}, "bad_loss_mask"),
        ({"input_ids": [1, 5, 99999], "loss_mask": [0, 1, 1]}, "bad_token_ids"),
        ({"input_ids": [1, -5, 9], "loss_mask": [0, 1, 1]}, "bad_token_ids"),
        ({"input_ids": [1, 2.5, 9], "loss_mask": [0, 1, 1]}, "bad_token_ids"),
        ({"input_ids": [1, 2**70], "loss_mask": [1, 1]}, "bad_token_ids"),
        ({"input_ids": [], "loss_mask": []}, "bad_token_ids"),
        ({"input_ids": [1, 5, 9], "loss_mask": [1, 0, 1]}, "too_few_supervised"),
    ],
)
def test_token_ids_are_taken_as_they_are_and_need_no_template(tokenizer, read_files, tmp_path, row, reason):
    """DI-32."""
    write_lines(tmp_path / "a.jsonl", row)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    (result,) = read_files(tmp_path, "a.jsonl", tokenizer=bare)
    assert result.reason == reason, result.detail
    if not reason:
        assert result.samples[0].input_ids.tolist() == row["input_ids"]
        assert result.samples[0].loss_mask.tolist() == [int(value) for value in row["loss_mask"]]


def test_conversations_without_a_chat_template_stop_at_once_and_text_does_not(tokenizer, read_files, tmp_path):
    """TK-01."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    write_lines(tmp_path / "chat.jsonl", CHAT)
    write_lines(tmp_path / "text.jsonl", {"text": "the fox"})
    with pytest.raises(DataError, match=r"no chat template.*set data.chat_template"):
        read_files(tmp_path, "chat.jsonl", tokenizer=bare)
    (result,) = read_files(tmp_path, "text.jsonl", tokenizer=bare)
    assert result.samples[0].loss_mask.all()


def test_a_template_that_is_none_is_named_before_any_row(tokenizer, read_files, tmp_path):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{% for m in messages %}"
    with pytest.raises(DataError, match="chat template, line 1"):
        read_files(write_lines(tmp_path / "a.jsonl", CHAT).parent, "a.jsonl", tokenizer=broken)


def test_repeated_rows_are_counted_or_dropped(read_files, tmp_path):
    as_pair = {"prompt": "the fox", "response": "the lazy dog"}
    write_lines(tmp_path / "a.jsonl", CHAT, as_pair, {"text": "the fox"})
    assert [result.notes for result in read_files(tmp_path, "a.jsonl")] == [(), ("duplicate",), ()]
    reasons = [result.reason for result in read_files(tmp_path, "a.jsonl", duplicates="drop")]
    assert reasons == ["", "duplicate", ""]


def read_manifest(folder, tokenizer, text):
    (folder / "m.toml").write_text(text)
    return list(read_rows(resolve_data(DataSection(manifest="m.toml"), folder), tokenizer, num_processes=1))


def test_sources_have_limits_and_weights(tmp_path, tokenizer):
    rows = [{"text": f"the fox {number}"} for number in range(200)]
    write_lines(tmp_path / "a.jsonl", *rows)
    write_lines(tmp_path / "b.jsonl", *rows)
    results = read_manifest(
        tmp_path,
        tokenizer,
        """
        name = "mix"
        sources = [
            { path = "a.jsonl", limit = 3, weight = 2 },
            { path = "b.jsonl", weight = 0.25, loss_on = "all" },
        ]
        """,
    )
    assert [len(result.samples) for result in results[:3]] == [2, 2, 2]
    taken = [result for result in results[3:] if result.status == "kept"]
    assert len(results) == 203
    assert 25 < len(taken) < 75
    assert {result.reason for result in results[3:]} == {"", "not_sampled"}


def test_repeats_of_a_sample_have_names_of_their_own():
    ids, mask = np.array([1, 2], np.int32), np.array([0, 1], np.uint8)
    names = {sample_id(ids, mask, occurrence) for occurrence in range(3)}
    assert len(names) == 3
    assert all(len(name) == 32 for name in names)
    assert sample_id(ids, mask[::-1], 0) not in names


def test_a_setting_of_the_config_wins_over_the_manifest(tmp_path):
    write_lines(tmp_path / "a.jsonl", CHAT)
    (tmp_path / "t.jinja").write_text("template")
    (tmp_path / "m.toml").write_text(
        """
        name = "m"
        chat_template = "t.jinja"
        chat_template_kwargs = { enable_thinking = false }
        max_tokens = 100
        too_long = "drop"
        loss_on = "all"
        history = "refuse"
        sources = [{ path = "a.jsonl", loss_on = "assistant" }, { path = "a.jsonl" }]
        """
    )
    data = resolve_data(DataSection(manifest="m.toml"), tmp_path)
    assert (data.name, data.max_tokens, data.too_long, data.history) == ("m", 100, "drop", "refuse")
    assert (data.control_tokens, data.duplicates, data.chat_template) == ("text", "keep", "template")
    assert data.chat_template_kwargs == {"enable_thinking": False}
    assert [source.loss_on for source in data.sources] == ["assistant", "all"]
    mine = DataSection(
        manifest="m.toml", max_tokens=50, loss_on="all", chat_template_kwargs={}, sources=("a.jsonl",), history="expand"
    )
    data = resolve_data(mine, tmp_path)
    assert (data.max_tokens, data.too_long, data.chat_template_kwargs, data.history) == (50, "drop", {}, "expand")
    assert [source.loss_on for source in data.sources] == ["all"]
    with pytest.raises(ConfigError, match="no sources"):
        resolve_data(DataSection(), tmp_path)


@pytest.mark.parametrize("path", sorted(Path("data_manifests").glob("*.toml")), ids=str)
def test_the_manifests_that_come_along_are_valid(path):
    assert load_config(path, DataManifest).name == path.stem


def test_a_hub_data_set_is_streamed(monkeypatch, tokenizer, tmp_path):
    """The library is optional; a module of the same shape stands in for it."""
    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))
        return iter([{**CHAT, "extra": None}, {"text": None}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    section = DataSection(sources=("hub:owner/chats:train_sft",))
    first, second = read_rows(resolve_data(section, tmp_path), tokenizer)
    assert asked == [("owner/chats", "train_sft", True)]
    assert (first.source, first.status, second.reason) == ("hub:owner/chats:train_sft", "kept", "unknown_shape")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"dflash-tools\[hub\]"):
        list(read_rows(resolve_data(section, tmp_path), tokenizer))


def test_a_file_is_read_in_pieces_and_not_held(tokenizer, tmp_path):
    """The reading of a big file stops where the caller stops."""
    write_lines(tmp_path / "a.jsonl", *({"text": f"the fox {number}"} for number in range(50_000)))
    results = read_rows(resolve_data(DataSection(sources=("a.jsonl",)), tmp_path), tokenizer, num_processes=1)
    tracemalloc.start()
    for _ in range(600):
        next(results)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    results.close()
    assert peak < 8 << 20
