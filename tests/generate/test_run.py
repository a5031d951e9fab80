"""The command as a whole: order, resume, accounting, and what lies beside the file."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import pytest
from generate.conftest import ask, read_lines
from generate.loopback import answer_ids, serve

from dflash_tools.config import DataSection
from dflash_tools.data import load_tokenizer, read_rows, resolve_data
from dflash_tools.errors import ConfigError, DataError, Interrupted, ResumeError, UserError
from dflash_tools.generate import client as client_module
from dflash_tools.generate import server as server_module
from dflash_tools.generate.local import LocalWriter
from dflash_tools.generate.run import run_generation


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def run(make_config, tmp_path):
    def generate(*rows, url="", server=None, **options):
        settings = {"base_url": url, "timeout_seconds": 2.0, "max_retries": 2, "concurrency": 4, **(server or {})}
        config = make_config(*rows, server=settings if url else None, **options)
        return run_generation(config, tmp_path, tmp_path / "out.jsonl")

    return generate


ROWS = [ask("hi"), ask("the fox", "and"), ask("a"), ask("dog"), ask("over", "the", "cat")]


def good(handler, prompt, number):
    handler.reply_as_vllm(prompt)


def test_the_file_of_a_local_target_reads_as_it_was_generated(run, tmp_path, tiny_target_dir):
    figures = run(*ROWS, sampling={"temperature": 1.0, "max_new_tokens": 12})
    rows = read_lines(tmp_path / "out.jsonl")
    assert figures["read"] == figures["kept"] == 5
    assert figures["num_samples"] == len(rows)
    assert figures["num_supervised_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    data = resolve_data(DataSection(manifest="out.toml"), tmp_path)
    results = list(read_rows(data, load_tokenizer(str(tiny_target_dir))))
    assert {result.status for result in results} == {"kept"}
    assert [result.samples[0].input_ids.tolist() for result in results] == [row["input_ids"] for row in rows]
    assert [result.samples[0].loss_mask.tolist() for result in results] == [row["loss_mask"] for row in rows]
    assert sorted(path.name for path in tmp_path.glob("out.*")) == ["out.jsonl", "out.record", "out.toml"]


def test_the_order_is_that_of_the_input_whatever_the_timing(run, tmp_path):
    def slow_at_first(handler, prompt, number):
        with handler.server.guard:
            delay = 0.2 / (1 + len(handler.server.requests))
        time.sleep(delay)
        good(handler, prompt, number)

    with serve(slow_at_first) as server:
        figures = run(*ROWS, url=server.url)
    rows = read_lines(tmp_path / "out.jsonl")
    assert [row["source_row"] for row in rows] == sorted(row["source_row"] for row in rows)
    assert {row["source_row"] for row in rows} == {1, 2, 3, 4, 5}
    assert figures["num_conversations"] == 5
    for row in rows:
        start = row["loss_mask"].index(1)
        expected = answer_ids(row["input_ids"][:start])
        assert row["input_ids"][start : start + len(expected)] == expected


def test_every_turn_is_asked_with_the_answers_before_it(run, tmp_path):
    with serve(good) as server:
        run(ask("over", "the", "cat"), url=server.url)
    prompts = [request["prompt"] for _, request, _ in server.requests]
    assert len(prompts) == 3
    rows = read_lines(tmp_path / "out.jsonl")
    assert sum(sum(row["loss_mask"]) for row in rows) == 12
    assert len(rows[-1]["messages"]) == 6


def test_a_run_that_failed_goes_on_with_what_is_missing(run, tmp_path):
    def refuse_dog(handler, prompt, number):
        if len(handler.server.tries) > 2:
            handler.send(500, {"error": "down"})
        else:
            good(handler, prompt, number)

    rows = [ask("hi"), ask("a"), ask("dog"), ask("cat")]
    with serve(refuse_dog) as server, pytest.raises(UserError, match=r"2 prompts have no answer.*same command again"):
        run(*rows, url=server.url, server={"concurrency": 1})
    assert not (tmp_path / "out.jsonl").exists()
    with serve(good) as server:
        figures = run(*rows, url=server.url)
        assert len(server.tries) == 2
    assert figures["num_samples"] == 4
    assert [row["source_row"] for row in read_lines(tmp_path / "out.jsonl")] == [1, 2, 3, 4]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_prompts_without_answer_are_listed_as_dropped_on_request(run, tmp_path, capsys):
    def refuse_long(handler, prompt, number):
        if len(prompt) > 24:
            handler.send(500, {"error": "down"})
        else:
            good(handler, prompt, number)

    rows = [ask("hi"), ask("the lazy dog sat on the mat and the cat"), {"foo": 1}]
    with serve(refuse_long) as server:
        figures = run(*rows, url=server.url, server={"on_failure": "drop"})
    assert (figures["kept"], figures["dropped"]) == (1, 2)
    assert figures["dropped_by_reason"] == {"unknown_shape": 1, "no_answer": 1}
    assert "WARNING: only 1 of 3 rows" in capsys.readouterr().err
    record = json.loads((tmp_path / "out.record").read_text())
    assert [(row["source_row"], row["reason"]) for row in record["dropped"]] == [(2, "no_answer"), (3, "unknown_shape")]


def test_a_conversation_is_not_kept_by_half_when_the_server_fails_in_between(run, tmp_path):
    def fail_later(handler, prompt, number):
        if len(handler.server.tries) > 1:
            handler.send(503, {})
        else:
            good(handler, prompt, number)

    with serve(fail_later) as server, pytest.raises(UserError, match="1 prompts have no answer"):
        run(ask("hi", "and"), url=server.url)


def test_a_later_turn_that_is_refused_ends_the_conversation(run, tmp_path):
    def refuse_later(handler, prompt, number):
        if len(handler.server.tries) > 1:
            handler.send(400, {"error": "the context is full"})
        else:
            good(handler, prompt, number)

    with serve(refuse_later) as server:
        figures = run(ask("hi", "and"), url=server.url)
    assert (figures["kept"], figures["num_ended_early"], figures["num_samples"]) == (1, 1, 1)


def test_a_server_that_fails_for_all_stops_the_run(run, tmp_path):
    rows = [ask(f"question {number}") for number in range(60)]
    with serve(lambda handler, prompt, number: handler.send(400, {"error": "unknown field"})) as server:
        with pytest.raises(UserError, match=r"in a row got no answer, the last one: status 400: unknown field; see to"):
            run(*rows, url=server.url)
        assert len(server.tries) < 40
    assert len(server.tries) >= server_module.MIN_FAILURES


def test_a_server_without_token_ids_ends_the_run_with_one_sentence(run, tmp_path):
    with (
        serve(lambda handler, prompt, number: handler.reply_as_vllm(prompt, token_ids=None)) as server,
        pytest.raises(ConfigError, match="hold no token ids"),
    ):
        run(*ROWS, url=server.url)


def test_a_finished_file_is_left_alone_and_other_settings_are_refused(run, tmp_path, capsys):
    with serve(good) as server:
        first = run(*ROWS, url=server.url)
        asked = len(server.requests)
        content = (tmp_path / "out.jsonl").read_bytes()
        assert run(*ROWS, url=server.url) == first
        assert "is finished; nothing to do" in capsys.readouterr().err
        assert len(server.requests) == asked
        with pytest.raises(ResumeError, match=r"sampling\.temperature was 0\.7, is 0\.0; set them back"):
            run(*ROWS, url=server.url, sampling={"temperature": 0.0})
        with pytest.raises(ResumeError, match="prompts was"):
            run(*ROWS[:2], url=server.url)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_a_file_of_someone_else_is_not_replaced(run, tmp_path):
    (tmp_path / "out.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.toml: is there and was not written by generate"):
        run(ask("hi"))


def test_the_name_must_say_what_it_is(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.jsonl"):
        run_generation(make_config(ask("hi")), tmp_path, tmp_path / "out.parquet")


def test_data_without_a_question_is_refused_with_its_first_reason(run):
    with pytest.raises(DataError, match=r"none of 1 rows was answered; the first is .*:1: no_question"):
        run({"text": "the fox"})


def test_the_manifest_carries_template_and_its_arguments_to_extract(run, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{{ mode }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    with serve(good) as server:
        run(ask("hi"), url=server.url, chat_template="mine.jinja", chat_template_kwargs={"mode": "fox"})
    manifest = tomllib.loads((tmp_path / "out.toml").read_text())
    assert manifest["chat_template_kwargs"] == {"mode": "fox"}
    data = resolve_data(DataSection(manifest="out.toml"), tmp_path)
    assert data.chat_template == template.read_text()
    assert data.chat_template_kwargs == {"mode": "fox"}


def test_a_local_run_stopped_after_any_batch_ends_with_the_same_file(run, tmp_path, monkeypatch):
    options = {"sampling": {"temperature": 1.0, "max_new_tokens": 12}, "token_budget": 1}
    run(*ROWS, **options)
    whole = (tmp_path / "out.jsonl").read_bytes()
    write = LocalWriter._answer
    for stop_after in (0, 1, 2, 4):
        for path in tmp_path.glob("out.*"):
            path.unlink()
        calls = []

        def stopping(self, batch, calls=calls, limit=stop_after):
            if len(calls) == limit:
                raise Interrupted(signal.SIGTERM)
            calls.append(batch)
            return write(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(LocalWriter, "_answer", stopping)
            with pytest.raises(Interrupted):
                run(*ROWS, **options)
        assert not (tmp_path / "out.jsonl").exists()
        run(*ROWS, **options)
        assert (tmp_path / "out.jsonl").read_bytes() == whole


PROGRAM = """
import sys
from pathlib import Path
from dflash_tools.config import *
from dflash_tools.generate.local import LocalWriter
from dflash_tools.generate.run import run_generation
model, folder, url = sys.argv[1:]
config = GenerateConfig(
    target=TargetSection(model=model, dtype="float32"),
    data=PromptsSection(sources=("prompts.jsonl",)),
    sampling=SamplingSection(max_new_tokens=6),
    server=ServerSection(base_url=url, concurrency=2),
)
run_generation(config, Path(folder), Path(folder) / "out.jsonl")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_and_asks_only_what_is_missing(run, write_prompts, tmp_path, tiny_target_dir, sent):
    rows = [ask(f"question {number}") for number in range(12)]
    write_prompts(*rows)

    def slow(handler, prompt, number):
        time.sleep(0.05)
        good(handler, prompt, number)

    partial = tmp_path / "out.jsonl.partial"
    with serve(slow) as server:
        command = [sys.executable, "-c", PROGRAM, str(tiny_target_dir), str(tmp_path), server.url]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=dict(os.environ))
        while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(sent)
        process.wait(20)
    whole = partial.read_bytes().count(b"\n") - 1
    with serve(good) as server:
        figures = run(*rows, url=server.url)
        assert len(server.tries) == 12 - whole
    assert figures["num_samples"] == 12
    assert [row["source_row"] for row in read_lines(tmp_path / "out.jsonl")] == list(range(1, 13))
