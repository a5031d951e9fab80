"""The target tells whether the options are true."""

import pytest
import torch
from foreign_caches import WRITERS, save_torch, specforge_content, write_modelopt
from tiny_models import make_tiny_target

from dflash_tools.errors import ConfigError
from dflash_tools.store import open_store


def test_a_wrong_convention_of_layer_ids_is_found_out(tmp_path, made, convert):
    """EX-04: off by one is named with the layer that the states are really of."""
    source = write_modelopt(tmp_path / "cache", made)
    with pytest.raises(ConfigError, match=r"slot 0 of its states is the output of layer 1 .* not of layer 0 "):
        convert(source, "modelopt", tmp_path / "store", layer_ids_are="vllm")
    convert(source, "modelopt", tmp_path / "store", layer_ids_are="vllm", target_layer_ids=(2, 3, 5))
    assert open_store(tmp_path / "store").manifest.target_layer_ids == (1, 2, 4)


def test_another_target_of_the_same_shape_is_found_out(tmp_path, made, convert):
    other = make_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"near to no layer of .*other"):
        convert(write_modelopt(tmp_path / "cache", made), "modelopt", tmp_path / "store", target=str(other))


@pytest.mark.parametrize("tool", WRITERS)
def test_a_wrong_norm_state_is_found_out(tool, tmp_path, made, convert):
    told = "post_norm" if tool == "speculators" else "pre_norm"
    with pytest.raises(ConfigError, match=rf"so it is not {told}; give --last-hidden-state-is"):
        convert(
            WRITERS[tool](tmp_path / "cache", made),
            tool,
            tmp_path / "store",
            keep_last_hidden_state=True,
            last_hidden_state_is=told,
        )


def test_the_norm_state_can_be_told(tmp_path, made, convert):
    content = specforge_content(made[3]) | {"target_last_hidden_states": made[3].last}
    save_torch(tmp_path / "cache" / "0.ckpt", content)
    convert(
        tmp_path / "cache",
        "specforge",
        tmp_path / "store",
        keep_last_hidden_state=True,
        last_hidden_state_is="pre_norm",
    )
    assert open_store(tmp_path / "store").manifest.last_hidden_state == "pre_norm"


def test_a_cache_that_was_rounded_otherwise_is_still_recognised(tmp_path, made, convert):
    content = specforge_content(made[3])
    noise = torch.randn(content["hidden_states"].shape, generator=torch.Generator().manual_seed(0))
    states = content["hidden_states"].float()
    noisy = states + 0.1 * noise * states.square().mean(-1, keepdim=True).sqrt()
    save_torch(tmp_path / "cache" / "0.ckpt", content | {"hidden_states": noisy.to(torch.bfloat16)})
    assert convert(tmp_path / "cache", "specforge", tmp_path / "store")["kept"] == 1


def test_token_ids_beyond_the_target_are_refused(tmp_path, made, convert):
    content = specforge_content(made[3])
    save_torch(tmp_path / "cache" / "0.ckpt", content | {"input_ids": content["input_ids"] + 300})
    with pytest.raises(ConfigError, match=r"0\.ckpt: holds token id \d+, but .* embedding rows"):
        convert(tmp_path / "cache", "specforge", tmp_path / "store")
