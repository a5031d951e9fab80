"""``check``: the rules of a drafter folder, and of its pairing with a target whose config and tokenizer are read."""

from pathlib import Path
from typing import Any

from dflash_tools.config import TargetSection, resolve_model_folder
from dflash_tools.data import load_tokenizer, tokenizer_identity
from dflash_tools.drafter.check import Finding, TargetFacts, check_folder
from dflash_tools.drafter.checkpoint_file import LayerIdConvention
from dflash_tools.evaluate.subject import only_gguf
from dflash_tools.target.config_only import gguf_quantization, read_target_config, shape_of_config


def check_checkpoint(
    folder: Path, target: str | None = None, layer_ids_are: LayerIdConvention | None = None
) -> list[Finding]:
    """Check a drafter folder, and that it belongs to a target. No weights of the target are loaded.

    Args:
        folder: A drafter in the z-lab or the speculators layout.
        target: Hub id, folder or package:NAME of the target, or STORE/target; None leaves the pairing out.
        layer_ids_are: How layer ids count, where the file cannot tell.

    Raises:
        ConfigError: If the folder holds no drafter, or the target cannot be read.
        DataError: If the target has no usable tokenizer.
    """
    facts = None if target is None else read_target_facts(target)
    return check_folder(folder, facts, layer_ids_are=layer_ids_are)


def read_target_facts(target: str) -> TargetFacts:
    """Read a target's config and tokenizer.

    Raises:
        ConfigError: If the target is not found or of an unknown architecture.
        DataError: If it has no usable tokenizer.
    """
    gguf_file = only_gguf(target)
    section = TargetSection(model=target, gguf_file=gguf_file)
    config = read_target_config(section)
    shape, text = shape_of_config(config), config.get_text_config()
    return TargetFacts(
        name=target,
        revision=getattr(config, "_commit_hash", None),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_hidden_layers=shape.num_hidden_layers,
        rope_theta=_rope_theta(text),
        quantization=_quantization(target, gguf_file),
        tokenizer=tokenizer_identity(load_tokenizer(target, gguf_file=gguf_file)),
    )


def _rope_theta(text: Any) -> float | None:
    theta = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    return None if theta is None else float(theta)


def _quantization(target: str, gguf_file: str | None) -> str | None:
    if gguf_file is None:
        return None
    return f"dequantised {gguf_quantization(Path(resolve_model_folder(target)) / gguf_file)}"
