"""A real small model answers real prompts: SmolLM2-135M from its package."""

from pathlib import Path

import pytest
from generate.conftest import ask, read_lines
from tiny_models import SMOLLM2

from dflash_tools.config import DataSection, GenerateConfig, PromptsSection, SamplingSection, TargetSection
from dflash_tools.data import load_tokenizer, read_rows, resolve_data
from dflash_tools.generate.run import run_generation

pytestmark = pytest.mark.slow


def test_smollm2_answers_a_sum_and_extract_reads_its_ids(write_prompts, tmp_path):
    config = GenerateConfig(
        target=TargetSection(**SMOLLM2, device="cpu"),
        data=PromptsSection(sources=(str(write_prompts(ask("What is 2 + 2?"), ask("Say hello.", "Again, please."))),)),
        sampling=SamplingSection(temperature=0.0, max_new_tokens=24),
    )
    figures = run_generation(config, Path(), tmp_path / "out.jsonl")
    assert figures["kept"] == 2
    rows = read_lines(tmp_path / "out.jsonl")
    assert "4" in rows[0]["messages"][-1]["content"]
    tokenizer = load_tokenizer(**SMOLLM2)
    read = [
        sample
        for result in read_rows(resolve_data(DataSection(manifest="out.toml"), tmp_path), tokenizer)
        for sample in result.samples
    ]
    assert [sample.input_ids.tolist() for sample in read] == [row["input_ids"] for row in rows]
    assert [sample.loss_mask.tolist() for sample in read] == [row["loss_mask"] for row in rows]
    for row in rows:
        ends = [token for token, counts in zip(row["input_ids"], row["loss_mask"], strict=True) if counts][-1:]
        assert (ends == [tokenizer.eos_token_id]) == (row["finish_reasons"][-1] == "stop")
