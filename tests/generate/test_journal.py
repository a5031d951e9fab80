"""Answers on disk: whole lines or none, whatever happens in between."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.errors import ResumeError, UserError
from dflash_tools.generate.journal import Journal

SETTINGS = {"sampling.seed": 0, "target.model": "tiny"}


def entry(name):
    return {"id": name, "ended_early": "", "rows": [{"input_ids": [1, 2], "messages": [{"content": "a\u2028b\nc"}]}]}


def test_what_was_appended_is_there_after_a_restart(tmp_path):
    path = tmp_path / "a.jsonl.partial"
    with Journal(path, SETTINGS) as journal:
        journal.append([entry("a"), entry("b")])
        journal.append([entry("c")])
    with Journal(path, SETTINGS) as journal:
        assert [name in journal for name in "abcd"] == [True, True, True, False]
        assert [journal.read(name) for name in "cab"] == [entry("c"), entry("a"), entry("b")]


@settings(max_examples=30)
@given(st.data())
def test_a_file_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl.partial"
    with Journal(path, SETTINGS) as journal:
        journal.append([entry("a"), entry("b")])
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = max(content[:cut].count(b"\n") - 1, 0)
    with Journal(path, SETTINGS) as journal:
        assert len(journal) == whole
        journal.append([entry("c")])
    with Journal(path, SETTINGS) as journal:
        assert len(journal) == whole + 1
        assert journal.read("c") == entry("c")


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "a.jsonl.partial"
    Journal(path, SETTINGS).__exit__(None, None, None)
    with pytest.raises(ResumeError, match=r"sampling\.seed was 0, is 1; set them back"):
        Journal(path, {**SETTINGS, "sampling.seed": 1})


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "a.jsonl.partial"
    with Journal(path, SETTINGS) as journal:
        journal.append([entry("a")])
    path.write_bytes(path.read_bytes() + b"{broken\n")
    with pytest.raises(ResumeError, match="line 3 is damaged, it should be JSON with id; remove the line and run"):
        Journal(path, SETTINGS)


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = tmp_path / "a.jsonl.partial"
    path.write_text('{"prompt": "hi"}\n')
    with pytest.raises(ResumeError, match="line 1 is damaged, it should be JSON with settings; remove the file"):
        Journal(path, SETTINGS)


def test_a_second_writer_is_refused(tmp_path):
    with (
        Journal(tmp_path / "a.jsonl.partial", SETTINGS),
        pytest.raises(ResumeError, match="another process writes it"),
    ):
        Journal(tmp_path / "a.jsonl.partial", SETTINGS)


def test_a_full_disk_is_said_in_one_sentence_and_what_was_written_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.partial"
    journal = Journal(path, SETTINGS)
    journal.append([entry("a")])
    # Linux has a device that is always full.
    with Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(journal, "_file", full)
        with pytest.raises(UserError, match="No space left on device; free some space"):
            journal.append([entry("b")])
    monkeypatch.undo()
    journal.__exit__(None, None, None)
    with Journal(path, SETTINGS) as again:
        assert "a" in again
        assert "b" not in again
