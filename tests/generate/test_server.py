"""A server that times out, is busy, fails, cuts the connection and talks nonsense; and what cannot be mended."""

import time

import pytest
from generate.loopback import STOP_ID, answer_ids, serve

from dflash_tools.config import SamplingSection, ServerSection
from dflash_tools.data.sample import RowError
from dflash_tools.errors import ConfigError
from dflash_tools.generate import client as client_module
from dflash_tools.generate.apis import Question
from dflash_tools.generate.client import Client, _read_pause, pause_seconds

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_SECONDS", 0.005)


def ask(url, *, prompt=PROMPT, sampling=None, **options):
    client = Client(ServerSection(**{"base_url": url, "timeout_seconds": 0.3, "max_retries": 3, **options}))
    sampling = sampling or SamplingSection()
    return client.ask(Question(model="tiny", token_ids=prompt, max_new_tokens=9, sampling=sampling, seed=11))


def misbehave_once(how):
    def behave(handler, prompt, number):
        if number == 1:
            how(handler, prompt)
        else:
            handler.reply_as_vllm(prompt)

    return behave


TROUBLES = {
    "timeout": lambda handler, prompt: time.sleep(0.5),
    "drip": lambda handler, prompt: handler.drip(0.05),
    "429": lambda handler, prompt: handler.send(429, {"error": "busy"}),
    "500": lambda handler, prompt: handler.send(500, {"error": {"message": "boom"}}),
    "503 in HTML": lambda handler, prompt: handler.send(503, b"<html>down</html>"),
    "cut": lambda handler, prompt: handler.cut(),
    "closed": lambda handler, prompt: handler.connection.close(),
    "malformed": lambda handler, prompt: handler.send(200, b'{"choices": [{"token_ids": [1, 2'),
    "not UTF-8": lambda handler, prompt: handler.send(200, b"\xff\xfe{}"),
    "no choices": lambda handler, prompt: handler.send(200, {"choices": []}),
    "a list": lambda handler, prompt: handler.send(200, [1]),
    "ids as text": lambda handler, prompt: handler.reply_as_vllm(prompt, token_ids=["1"]),
    "negative ids": lambda handler, prompt: handler.reply_as_vllm(prompt, token_ids=[-1]),
    "no ids at all": lambda handler, prompt: handler.reply_as_vllm(prompt, token_ids=[]),
    "aborted": lambda handler, prompt: handler.reply_as_vllm(prompt, finish_reason="abort"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_may_pass_is_tried_again(trouble):
    with serve(misbehave_once(TROUBLES[trouble])) as server:
        answer = ask(server.url)
    assert answer.token_ids == answer_ids(PROMPT)
    assert answer.finish_reason == "stop"
    assert server.tries[tuple(PROMPT)] == 2


def test_retry_after_is_waited_for():
    busy = misbehave_once(lambda handler, prompt: handler.send(429, {}, Retry_After="0.25"))
    with serve(busy) as server:
        started = time.monotonic()
        ask(server.url)
    assert time.monotonic() - started >= 0.25


def test_a_date_to_retry_after_is_read():
    assert 50 < _read_pause(time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))) <= 60
    assert _read_pause("soon") == _read_pause("-5") == 0.0


def test_pauses_double_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_SECONDS", 1.0)
    pauses = [pause_seconds(number) for number in range(12)]
    assert all(0.75 * 2**number <= pauses[number] <= 1.25 * 2**number for number in range(5))
    assert pauses[-1] <= 1.25 * client_module.LONGEST_PAUSE_SECONDS


def test_a_server_that_never_answers_is_given_up_with_its_last_words():
    with serve(lambda handler, prompt, number: handler.send(500, {"error": {"message": "out of\nmemory"}})) as server:
        with pytest.raises(RowError, match=r"no_answer: http://.*: status 500: out of memory, 4 tries"):
            ask(server.url)
        assert server.tries[tuple(PROMPT)] == 4


def test_nobody_listening_is_said():
    with serve(lambda handler, prompt, number: None) as server:
        url = server.url
    with pytest.raises(RowError, match="no connection, 2 tries"):
        ask(url, max_retries=1)


def test_a_refused_question_is_not_asked_again():
    with serve(lambda handler, prompt, number: handler.send(400, {"error": {"message": "too long"}})) as server:
        with pytest.raises(RowError, match="refused_by_server: status 400: too long"):
            ask(server.url)
        assert server.tries[tuple(PROMPT)] == 1


@pytest.mark.parametrize("status", [302, 401, 403, 404])
def test_a_wrong_address_key_or_model_stops_at_once(status):
    with serve(lambda handler, prompt, number: handler.send(status, {"message": "no such model"})) as server:
        with pytest.raises(ConfigError, match=rf"status {status}: no such model; correct server\.base_url"):
            ask(server.url)
        assert server.tries[tuple(PROMPT)] == 1


def test_a_server_without_token_ids_is_refused_in_one_sentence():
    with (
        serve(lambda handler, prompt, number: handler.reply_as_vllm(prompt, token_ids=None)) as server,
        pytest.raises(ConfigError, match=r"hold no token ids .* use a vLLM that knows return_token_ids") as caught,
    ):
        ask(server.url)
    assert "\n" not in str(caught.value)


def test_a_server_that_reads_other_prompt_ids_is_refused():
    with (
        serve(lambda handler, prompt, number: handler.reply_as_vllm(prompt, prompt_token_ids=[1, *prompt])) as server,
        pytest.raises(ConfigError, match="changed the token ids of the prompt"),
    ):
        ask(server.url)


def test_sglang_is_asked_by_its_own_call():
    with serve(lambda handler, prompt, number: handler.reply_as_sglang(prompt)) as server:
        answer = ask(server.url + "/", api="sglang", sampling=SamplingSection(temperature=0.5, top_k=0))
    assert answer.token_ids == answer_ids(PROMPT)
    ((path, request, _),) = server.requests
    assert path == "/generate"
    assert request["input_ids"] == PROMPT
    assert request["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_sglang_without_output_ids_is_refused():
    with (
        serve(lambda handler, prompt, number: handler.reply_as_sglang(prompt, output_ids=None)) as server,
        pytest.raises(ConfigError, match="no token ids"),
    ):
        ask(server.url, api="sglang")


def test_the_stop_token_is_added_where_the_server_names_it_and_leaves_it_out():
    def behave(handler, prompt, number):
        handler.reply_as_vllm(prompt, token_ids=[30, 31], stop_reason=STOP_ID)

    with serve(behave) as server:
        assert ask(server.url).token_ids == [30, 31, STOP_ID]


def test_vllm_gets_every_sampling_setting_and_the_key(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc")
    with serve(lambda handler, prompt, number: handler.reply_as_vllm(prompt, finish_reason="length")) as server:
        answer = ask(server.url + "/v1", api_key_env="SERVER_KEY")
    assert answer.finish_reason == "length"
    ((path, request, authorization),) = server.requests
    assert (path, authorization) == ("/v1/completions", "Bearer abc")
    assert request == {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 9,
        "seed": 11,
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match=r"server\.base_url = .* no address"):
        Client(ServerSection(base_url=url))


def test_a_key_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match="no such environment variable"):
        Client(ServerSection(base_url="http://127.0.0.1:1", api_key_env="SERVER_KEY"))
