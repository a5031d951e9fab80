"""Load a target: hub id, local folder, folder of an installed package, or GGUF weights, which are dequantised."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_tools.config import TargetSection, resolve_model_folder
from dflash_tools.contracts.manifest import TargetIdentity
from dflash_tools.errors import ConfigError
from dflash_tools.target.backbone import Parts, find_parts
from dflash_tools.target.config_only import config_fingerprint, gguf_quantization, read_target_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A loaded target, in eval mode and without gradients."""

    model: Any  # PreTrainedModel; its forward and cache are transformers' own
    tokenizer_source: str  # folder or hub id
    parts: Parts
    identity: TargetIdentity
    device: torch.device  # of the input embedding; where token ids go
    dtype: torch.dtype

    @property
    def backbone(self) -> nn.Module:
        """The text model without head; its forward gives no logits."""
        return self.parts.backbone

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers."""
        return self.parts.layers

    @property
    def embedding(self) -> nn.Module:
        """Input embedding; ``weight`` has shape (V, H)."""
        return self.parts.embedding

    @property
    def final_norm(self) -> nn.Module:
        """Norm between the last layer and the head."""
        return self.parts.final_norm

    @property
    def head(self) -> nn.Module:
        """Output layer; ``weight`` has shape (V, H)."""
        return self.parts.head


def load_target(section: TargetSection) -> Target:
    """Load a target for forward passes.

    Args:
        section: The ``[target]`` table of a config.

    Raises:
        ConfigError: If the model is not found, its architecture or attention is not usable, or memory is short.
    """
    config = read_target_config(section)
    folder = resolve_model_folder(section.model)
    device = choose_device(section.device)
    model = _load_model(section, folder, config)
    if section.device_map is None:
        model = _to_device(model, device, section.model)
    model.eval().requires_grad_(False)
    parts = find_parts(model)
    weight = parts.embedding.weight
    assert isinstance(weight, torch.Tensor)
    return Target(
        model=model,
        tokenizer_source=folder,
        parts=parts,
        identity=_identity(section, folder, model, parts),
        device=weight.device if section.device_map is not None else device,
        dtype=DTYPES[section.dtype],
    )


def choose_device(name: str) -> torch.device:
    """Resolve a device: auto = CUDA if there is one, this process's own under torchrun.

    Raises:
        ConfigError: If the device does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"target.device = {name!r}: not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"target.device = {name!r}: this machine has no usable CUDA device; use cpu or auto")
        if ":" not in name:
            return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return device


def local_rank() -> int:
    """Number of this process on its machine, from torchrun's or SLURM's environment; 0 alone."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def _load_model(section: TargetSection, folder: str, config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GgufConfig

    options: dict[str, Any] = {
        "revision": section.revision,
        "trust_remote_code": section.trust_remote_code,
        "dtype": DTYPES[section.dtype],
        "attn_implementation": section.attn_implementation,
    }
    if section.device_map is not None:
        options["device_map"] = section.device_map
    if section.gguf_file is not None:
        options |= {"gguf_file": section.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    kind = type(config)
    loader: Any = AutoModelForCausalLM
    if kind not in AutoModelForCausalLM._model_mapping and kind in AutoModelForImageTextToText._model_mapping:
        loader = AutoModelForImageTextToText
    try:
        return loader.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError) as error:
        if "attn_implementation" in str(error) or "attention implementation" in str(error):
            raise ConfigError(
                f"target.attn_implementation = {section.attn_implementation!r}: {config.model_type} does not run with "
                'it; set it to "eager", or to what the model card asks for'
            ) from None
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"target.model = {section.model!r}: cannot be loaded: {reason}") from None


def _to_device(model: Any, device: torch.device, name: str) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        raise ConfigError(
            f"target.model = {name!r}: its weights take {num_bytes / 1e9:.1f} GB, more than is free on {device}; "
            'set target.device_map = "auto" to spread them over several devices'
        ) from None


def _identity(section: TargetSection, folder: str, model: Any, parts: Parts) -> TargetIdentity:
    text, weight = parts.text_config, parts.embedding.weight
    assert isinstance(weight, torch.Tensor)
    quantization = None
    if section.gguf_file is not None and (Path(folder) / section.gguf_file).is_file():
        quantization = f"dequantised {gguf_quantization(Path(folder) / section.gguf_file)}"
    elif getattr(model.config, "quantization_config", None) is not None:
        quantization = str(getattr(model.config.quantization_config, "quant_method", "quantised"))
    return TargetIdentity(
        model=section.model,
        revision=section.revision or getattr(model.config, "_commit_hash", None),
        gguf_file=section.gguf_file,
        architecture=type(model).__name__,
        model_type=text.model_type,
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=weight.shape[0],
        dtype=section.dtype,
        quantization=quantization,
        attn_implementation=section.attn_implementation,
        config_fingerprint=config_fingerprint(model.config),
    )
