"""The same with the tokenizer and the template of a released model."""

from pathlib import Path

import pytest
from tiny_models import SMOLLM2

from dflash_tools.config import DataSection
from dflash_tools.data import choose_split, load_tokenizer, read_rows, resolve_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(**SMOLLM2)


def test_the_python_reference_is_cut_at_paragraph_ends_with_a_real_tokenizer(smollm2):
    section = DataSection(manifest="data_manifests/python-reference.toml")
    data = resolve_data(section, Path(__file__).parents[2])
    results = list(read_rows(data, smollm2))
    samples = [sample for result in results for sample in result.samples]
    assert {result.status for result in results} == {"kept"}
    assert len(samples) > len(results)
    assert max(len(sample.input_ids) for sample in samples) <= 2048
    assert all(sample.loss_mask.all() for sample in samples)
    held_out = choose_split([sample.conversation_id for sample in samples], 0.1, 8)
    assert 8 <= held_out.sum() < len(samples) / 2
