import json

import gguf
import pytest
import torch
from tiny_models import make_tiny_tokenizer

from dflash_tools.config import TargetSection
from dflash_tools.errors import ConfigError
from dflash_tools.target.config_only import read_target_config, shape_of_config
from dflash_tools.target.load import load_target


def section(folder, **changes):
    return TargetSection(**{"model": str(folder), "dtype": "float32", "device": "cpu"} | changes)


def test_a_local_folder_loads_without_gradients_and_knows_itself(tiny_target_dir):
    target = load_target(section(tiny_target_dir, dtype="bfloat16"))
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training
    assert target.identity.architecture == "LlamaForCausalLM"
    assert (target.identity.num_hidden_layers, target.identity.hidden_size) == (6, 32)
    assert target.embedding.weight.dtype == torch.bfloat16
    assert target.head.weight is target.embedding.weight


def test_sizes_are_known_without_weights_and_the_identity_does_not_hold_the_path(tiny_target_dir, tmp_path):
    shape = shape_of_config(read_target_config(section(tiny_target_dir)))
    assert (shape.num_hidden_layers, shape.hidden_size) == (6, 32)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "config.json").write_bytes((tiny_target_dir / "config.json").read_bytes())
    assert shape_of_config(read_target_config(section(copy))).config_fingerprint == shape.config_fingerprint
    changed = json.loads((copy / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (copy / "config.json").write_text(json.dumps(changed))
    assert shape_of_config(read_target_config(section(copy))).config_fingerprint != shape.config_fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "package:no_such_package"}, "pip install"),
        ({"gguf_file": "missing.gguf"}, "not in"),
        ({"device": "cuda:77"}, "no usable CUDA|not a device"),
        ({"device": "toaster"}, "not a device"),
        ({"attn_implementation": "flash_attention_9"}, "attn_implementation"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(tiny_target_dir, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_target(section(tiny_target_dir, **changes))


def test_an_empty_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_target(section(tmp_path))


def test_a_gguf_of_an_unknown_architecture_is_refused_before_any_weight(tmp_path):
    """EX-14."""
    make_tiny_tokenizer(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="unheard-of"):
        read_target_config(section(tmp_path, gguf_file="odd.gguf"))


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all, really not")
    with pytest.raises(ConfigError, match="not a readable GGUF"):
        read_target_config(section(tmp_path, gguf_file="bad.gguf"))
