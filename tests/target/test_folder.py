import json

import torch
from safetensors.torch import load_file
from tiny_architectures import make_architecture
from tiny_models import make_tiny_tokenizer

from dflash_tools.config import TargetSection
from dflash_tools.target.folder import write_target_folder
from dflash_tools.target.load import load_target


def test_the_folder_holds_what_training_needs(tiny_target_dir, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    target = load_target(TargetSection(model=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    write_target_folder(target, tokenizer, tmp_path / "target")
    frozen = load_file(tmp_path / "target" / "frozen.safetensors")
    assert set(frozen) == {"embed_tokens.weight", "norm.weight"}  # the head is tied
    assert torch.equal(frozen["embed_tokens.weight"], target.embedding.weight)
    config = AutoConfig.from_pretrained(tmp_path / "target")
    assert (config.architectures, config.num_hidden_layers) == (["LlamaForCausalLM"], 6)
    again = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert again.chat_template == tokenizer.chat_template
    assert again("the fox")["input_ids"] == tokenizer("the fox")["input_ids"]
    assert (tmp_path / "target" / "generation_config.json").is_file()
    probe = json.loads((tmp_path / "target" / "probe.json").read_text())
    assert len(probe["input_ids"]) == len(probe["top1"]) == len(probe["gap"]) == 16


def test_writing_twice_gives_the_same_bytes(tiny_target_dir, tmp_path):
    from transformers import AutoTokenizer

    target = load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    for name in ("a", "b"):
        write_target_folder(target, tokenizer, tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert not any(str(tiny_target_dir).encode() in content for content in files.values())


def test_untied_heads_and_biases_are_kept(tmp_path):
    target = load_target(TargetSection(model=str(make_architecture("phi", tmp_path)), dtype="float32", device="cpu"))
    write_target_folder(target, make_tiny_tokenizer(tmp_path), tmp_path / "target")
    frozen = load_file(tmp_path / "target" / "frozen.safetensors")
    assert set(frozen) == {"embed_tokens.weight", "norm.weight", "norm.bias", "lm_head.weight", "lm_head.bias"}
    assert torch.equal(frozen["lm_head.weight"], target.head.weight)
