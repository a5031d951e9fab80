import pytest
import torch
from tiny_architectures import ARCHITECTURES, make_architecture, make_gemma3_wrapper

from dflash_tools.config import TargetSection
from dflash_tools.errors import ConfigError, StoreError
from dflash_tools.target.config_only import read_target_config, shape_of_config
from dflash_tools.target.folder import norm_factor
from dflash_tools.target.load import load_target
from dflash_tools.target.self_test import self_test

NEEDS_EAGER = ("gemma2", "gpt_oss")


@pytest.fixture
def target(tiny_target_dir):
    return load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_architectures_pass_the_self_test(name, dtype, tmp_path):
    """EX-07 for hybrids: padding does not reach the states."""
    folder = make_architecture(name, tmp_path)
    attention = "eager" if name in NEEDS_EAGER else "sdpa"
    target = load_target(TargetSection(model=str(folder), dtype=dtype, device="cpu", attn_implementation=attention))
    self_test(target, (1, 2, 4))
    assert target.identity.hidden_size == 32


def test_a_multimodal_wrapper_resolves_its_text_backbone(tmp_path):
    """EX-13."""
    section = TargetSection(model=str(make_gemma3_wrapper(tmp_path)), dtype="float32", device="cpu")
    shape = shape_of_config(read_target_config(section))
    assert (shape.num_hidden_layers, shape.hidden_size) == (6, 32)
    target = load_target(section)
    assert type(target.backbone).__name__ == "Gemma3TextModel"
    self_test(target, (1, 2, 4))


def test_an_attention_that_the_architecture_lacks_is_refused_with_the_way_out(tmp_path):
    section = TargetSection(model=str(make_architecture("gpt_oss", tmp_path)), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match='set it to "eager"'):
        load_target(section)


def test_a_gemma_norm_is_kept_as_the_factor_it_multiplies_with(tmp_path):
    section = TargetSection(model=str(make_architecture("gemma3_text", tmp_path)), dtype="float32", device="cpu")
    norm = load_target(section).final_norm
    torch.testing.assert_close(norm_factor(norm), 1.0 + norm.weight)


def test_padding_that_leaks_into_states_is_found(target):
    """A layer that mixes in the mean over positions, as a recurrence over padding would."""
    layer = target.layers[2]
    handle = layer.register_forward_hook(lambda module, args, output: output + 3 * output.mean(dim=1, keepdim=True))
    try:
        with pytest.raises(StoreError, match=r"padding leaks into them.*token_budget = 1"):
            self_test(target, (1, 3))
        self_test(target, (1, 3), batched=False)  # the way out that the message names
    finally:
        handle.remove()


def test_a_layer_of_zeros_is_found(target):
    """Weights that never arrived on their device give zeros."""
    handle = target.layers[3].register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    try:
        with pytest.raises(StoreError, match="layer 3 gives zeros only"):
            self_test(target, (1, 3))
    finally:
        handle.remove()


def test_values_beyond_float16_are_found_with_layer_and_advice(target):
    """EX-08."""
    handle = target.layers[1].register_forward_hook(lambda module, args, output: output * float("inf"))
    try:
        with pytest.raises(StoreError, match=r"layer 1 gives infinite or NaN.*bfloat16"):
            self_test(target, (1, 3))
    finally:
        handle.remove()


def test_logits_that_the_head_alone_does_not_give_are_found(target):
    model_forward = target.model.forward

    def doubled(*args, **kwargs):
        output = model_forward(*args, **kwargs)
        output.logits = 2.0 * output.logits
        return output

    target.model.forward = doubled
    with pytest.raises(StoreError, match="miss the model's own logits"):
        self_test(target, (1, 3))


def test_a_model_that_returns_no_hidden_states_is_named(target):
    model_forward = target.model.forward

    def without(*args, **kwargs):
        output = model_forward(*args, **kwargs)
        output.hidden_states = None
        return output

    target.model.forward = without
    with pytest.raises(StoreError, match="LlamaForCausalLM returned 0 hidden_states"):
        self_test(target, (1, 3))
