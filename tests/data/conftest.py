"""Small tokenizers that show the traits of model families; templates/ holds their chat templates, rewritten."""

from functools import cache
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).parent / "templates"

# family -> template, kind of tokenizer, control tokens (the first is BOS, the second EOS), whether it puts BOS first
FAMILIES = {
    "qwen2": ("qwen2", "bytes", ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), False),
    "qwen3": ("qwen3", "bytes", ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), False),
    "llama3": (
        "llama3",
        "bytes",
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        True,
    ),
    "gemma": ("gemma", "spaces", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), True),
    "mistral": ("mistral", "spaces", ("<s>", "</s>", "[INST]", "[/INST]"), True),
    "phi3": ("phi3", "bytes", ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), False),
    "deepseek": (
        "deepseek",
        "bytes",
        (
            "<|begin|>",
            "<|end|>",
            "<|User|>",
            "<|Assistant|>",
            *(f"<|tool_{part}|>" for part in ("calls_begin", "calls_end", "call_begin", "call_end")),
            "<|tool_output_begin|>",
            "<|tool_output_end|>",
        ),
        True,
    ),
    "smollm2": ("smollm2", "bytes", ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), False),
    "harmony": (
        "harmony",
        "bytes",
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        False,
    ),
    "marked": ("marked", "bytes", ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), False),
}


@cache
def make_family(name):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    template, kind, control, adds_bos = FAMILIES[name]
    core = Tokenizer(models.BPE(byte_fallback=kind == "spaces", unk_token="<unk>" if kind == "spaces" else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:  # the way of SentencePiece: every text begins with a space
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [*map(chr, range(33, 127)), "▁"]
    bytes_as_tokens = [f"<0x{number:02X}>" for number in range(256)] if kind == "spaces" else []
    trainer = trainers.BpeTrainer(
        vocab_size=760,
        special_tokens=["<unk>", *bytes_as_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(
        ["Hello there, how are you? The quick brown fox is fine.\n\n assistant user " * 4], trainer
    )
    swallow = {"rstrip": True} if name == "phi3" else {}
    core.add_special_tokens([AddedToken(token, special=True, normalized=False, **swallow) for token in control])
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{control[0]} $A", special_tokens=[(control[0], core.token_to_id(control[0]))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=control[0], eos_token=control[1])
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="session")
def family():
    return make_family


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from tiny_models import make_tiny_tokenizer

    from dflash_tools.data import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def read_files(tokenizer):
    """Read files of a folder as a config would name them."""
    from dflash_tools.config import DataSection
    from dflash_tools.data import read_rows, resolve_data

    def read(folder, *sources, strict=False, num_processes=1, tokenizer=tokenizer, **settings):
        data = resolve_data(DataSection(sources=sources, **settings), folder)
        return list(read_rows(data, tokenizer, strict=strict, num_processes=num_processes))

    return read
