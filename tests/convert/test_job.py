"""What must be asked, and what is refused before any file is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.convert.job import resolve_layer_ids
from dflash_tools.errors import ConfigError


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
def test_vllm_counts_one_more_than_zlab(layer_ids):
    """EX-04."""
    assert resolve_layer_ids(layer_ids, "zlab", 32) == tuple(layer_ids)
    assert resolve_layer_ids([layer + 1 for layer in layer_ids], "vllm", 32) == tuple(layer_ids)


def test_the_convention_is_asked_for_before_anything_is_read(tmp_path, convert):
    with pytest.raises(ConfigError, match=r"--layer-ids-are is missing.*zlab.*vllm"):
        convert(tmp_path / "absent", "modelopt", tmp_path / "store", layer_ids_are=None)


@pytest.mark.parametrize(
    ("layer_ids", "convention"), [([2, 18, 36], "vllm"), ([0, 5], "vllm"), ([1, 35], "zlab"), ([3, 3], "zlab")]
)
def test_ids_that_are_no_layers_are_refused(layer_ids, convention):
    with pytest.raises(ConfigError, match=r"--target-layer-ids .* from 0: .*The last hidden state has no id here"):
        resolve_layer_ids(layer_ids, convention, 36)
