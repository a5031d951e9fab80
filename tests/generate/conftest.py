"""A config for the tiny target, and rows to ask it."""

import json

import pytest

from dflash_tools.config import (
    ForwardSection,
    GenerateConfig,
    PromptsSection,
    SamplingSection,
    ServerSection,
    TargetSection,
)


def ask(*questions):
    return {"messages": [{"role": "user", "content": question} for question in questions]}


@pytest.fixture
def write_prompts(tmp_path):
    def write(*rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config(tiny_target_dir, write_prompts):
    def make(*rows, sampling=None, server=None, token_budget=16384, **data):
        return GenerateConfig(
            target=TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"),
            data=PromptsSection(sources=(str(write_prompts(*rows)),), **data),
            sampling=SamplingSection(**{"max_new_tokens": 6, **(sampling or {})}),
            forward=ForwardSection(token_budget=token_budget),
            server=ServerSection(**(server or {})),
        )

    return make


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
