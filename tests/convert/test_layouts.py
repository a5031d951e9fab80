"""Where each tool keeps what, and what does not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.convert.cache_file import FileFault
from dflash_tools.convert.layouts import LAYOUTS, parse_sample, to_bits
from dflash_tools.errors import ConfigError
from dflash_tools.store.bf16 import to_bf16_bits


def parse(tool, content, *, num_layers=3, hidden_size=4, keep_last=True):
    return parse_sample(content, LAYOUTS[tool], num_layers=num_layers, hidden_size=hidden_size, keep_last=keep_last)


def states(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


@given(
    tool=st.sampled_from(sorted(LAYOUTS)),
    length=st.integers(1, 5),
    num_layers=st.integers(1, 4),
    hidden_size=st.integers(1, 5),
    batched=st.booleans(),
)
def test_slot_k_of_a_sample_is_block_k_of_the_file(tool, length, num_layers, hidden_size, batched):
    layout = LAYOUTS[tool]
    content = {layout.ids: torch.arange(length)}
    whole = states(length, num_layers + 1, hidden_size)
    if layout.last is None:
        content[layout.states] = whole
    else:
        content[layout.states] = whole[:, :-1].reshape(length, -1)
        content[layout.last] = whole[:, -1]
    if batched:
        content = {name: values[None] for name, values in content.items()}
    sample = parse(tool, content, num_layers=num_layers, hidden_size=hidden_size)
    assert torch.equal(sample.states_SKH, whole[:, :-1])
    assert torch.equal(sample.last_SH, whole[:, -1])
    assert sample.loss_mask is None
    assert sample.input_ids.tolist() == list(range(length))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_rounding_is_that_of_the_store(values):
    array = np.array(values, dtype=np.float32)
    assert np.array_equal(to_bits(torch.from_numpy(array)), to_bf16_bits(array))


def test_bfloat16_keeps_every_bit():
    """ST-01: subnormals, negative zero and the largest values included; a mapped, strided view too."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    tensor = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).reshape(256, 256)
    assert np.array_equal(to_bits(tensor), patterns.reshape(256, 256))
    assert np.array_equal(to_bits(tensor[:, 3:7]), patterns.reshape(256, 256)[:, 3:7])


@pytest.mark.parametrize(
    ("tool", "content", "sentence"),
    [
        ("specforge", {"hidden_states": states(5, 8)}, r"is \[5, 8\], expected \[tokens, 12\].*holds 2 layers"),
        ("specforge", {"hidden_states": states(5, 15)}, r"expected \[tokens, 12\].*give the target that was cached"),
        ("modelopt", {"aux_hidden_states": states(5, 12), "hidden_states": states(5, 6)}, r"expected \[tokens, 4\]"),
        ("speculators", {"hidden_states": states(5, 3, 4)}, r"\[5, 3, 4\], expected \[tokens, 4, 4\].*all slots but"),
        ("speculators", {"hidden_states": states(5, 4, 8)}, r"\[5, 4, 8\], expected \[tokens, 4, 4\]"),
        ("specforge", {"hidden_states": states(5, 12).to(torch.float8_e4m3fn)}, r"is float8_e4m3fn"),
    ],
)
def test_another_width_count_or_dtype_is_refused_in_a_sentence(tool, content, sentence):
    """EX-19."""
    with pytest.raises(ConfigError, match=sentence):
        parse(tool, content | {LAYOUTS[tool].ids: torch.arange(5)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": torch.arange(4)}, "length_mismatch"),
        ({"loss_mask": torch.ones(6)}, "length_mismatch"),
        ({"target_last_hidden_states": states(4, 4)}, "length_mismatch"),
        ({"input_ids": torch.arange(5.0)}, "bad_values"),
        ({"input_ids": torch.arange(-1, 4)}, "bad_values"),
        ({"loss_mask": torch.arange(5)}, "bad_values"),
        ({"input_ids": torch.arange(10).reshape(2, 5)}, "wrong_shape"),
        ({"input_ids": torch.arange(0), "hidden_states": states(0, 12)}, "wrong_shape"),
        ({"hidden_states": states(2, 5, 12)}, "wrong_shape"),
        ({"hidden_states": [1.0, 2.0]}, "wrong_shape"),
        ({"hidden_states": states(5, 12).to_sparse()}, "wrong_shape"),
    ],
)
def test_a_file_that_is_no_sample_is_a_fault_with_a_reason(change, reason):
    content = {
        "input_ids": torch.arange(5),
        "loss_mask": torch.ones(5),
        "hidden_states": states(5, 12),
        "target_last_hidden_states": states(5, 4),
    }
    assert parse("specforge", content).loss_mask.tolist() == [1] * 5
    with pytest.raises(FileFault) as caught:
        parse("specforge", content | change)
    assert caught.value.reason == reason


def test_a_last_hidden_state_is_asked_for_only_if_it_is_kept():
    content = {"input_ids": torch.arange(5), "hidden_states": states(5, 12)}
    assert parse("specforge", content, keep_last=False).last_SH is None
    with pytest.raises(FileFault, match="has no target_last_hidden_states"):
        parse("specforge", content)
