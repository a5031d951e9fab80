"""How a question is put to each kind of server, and how its answer is read: token ids in, token ids out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_tools.config import SamplingSection
from dflash_tools.errors import ConfigError
from dflash_tools.generate.dialogue import Answer


class UnusableAnswer(Exception):
    """What a server sent is no answer; it may do better when asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request.

    Attributes:
        model: Name of the target on the server.
        token_ids: What is to be continued.
        max_new_tokens: Longest answer.
        sampling: How tokens are chosen.
        seed: Of this answer.
    """

    model: str
    token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingSection
    seed: int


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask: path below the server's address, request body, and how the reply is read."""

    path: str
    write: Callable[[Question], dict[str, Any]]
    read: Callable[[Any, Question], Answer]


def _write_vllm(question: Question) -> dict[str, Any]:
    return {
        "model": question.model,
        "prompt": question.token_ids,
        "max_tokens": question.max_new_tokens,
        "seed": question.seed,
        "return_token_ids": True,
        **_write_sampling(question.sampling),
    }


def _write_sglang(question: Question) -> dict[str, Any]:
    return {
        "input_ids": question.token_ids,
        "sampling_params": {"max_new_tokens": question.max_new_tokens, **_write_sampling(question.sampling)},
    }


def _write_sampling(sampling: SamplingSection) -> dict[str, Any]:
    # All of them: a server fills what is missing from the checkpoint's generation config.
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _read_vllm(reply: Any, question: Question) -> Answer:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableAnswer("the reply holds no choices")
    choice = choices[0]
    if choice.get("token_ids") is None:
        raise ConfigError(
            "server: its answers hold no token ids (choices[0].token_ids), and text does not tell them; use a vLLM "
            'that knows return_token_ids, or SGLang with server.api = "sglang"'
        )
    asked = choice.get("prompt_token_ids")
    if asked is not None and asked != question.token_ids:
        raise ConfigError("server: it changed the token ids of the prompt; serve the same model as target.model names")
    return _make_answer(choice["token_ids"], choice.get("finish_reason"), choice.get("stop_reason"))


def _read_sglang(reply: Any, question: Question) -> Answer:
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict):
        raise UnusableAnswer("the reply holds no meta_info with finish_reason")
    if reply.get("output_ids") is None:
        raise ConfigError(
            "server: its answers hold no token ids (output_ids), and text does not tell them; use a newer SGLang"
        )
    return _make_answer(reply["output_ids"], finish.get("type"), finish.get("matched"))


def _make_answer(token_ids: Any, finish_reason: Any, stopped_by: Any) -> Answer:
    """Check the ids; add the token that stopped the answer where the server names it and leaves it out."""
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise UnusableAnswer("the token ids are no list of numbers")
    if finish_reason not in ("stop", "length"):
        raise UnusableAnswer(f"the answer ended with {finish_reason!r}")
    if finish_reason == "stop" and type(stopped_by) is int and token_ids[-1:] != [stopped_by]:
        token_ids = [*token_ids, stopped_by]
    if not token_ids:
        raise UnusableAnswer("the answer is empty")
    return Answer(token_ids, finish_reason)


APIS = {
    "vllm": Api("/v1/completions", _write_vllm, _read_vllm),
    "sglang": Api("/generate", _write_sglang, _read_sglang),
}
