"""Write a drafter in a layout that serving engines load, as a plain dict, and read it back before it counts."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_tools import __version__
from dflash_tools.contracts.manifest import DataIdentity, TargetIdentity, TokenizerIdentity
from dflash_tools.drafter.check import check_folder
from dflash_tools.drafter.check_config import MASK_IS_RESERVED
from dflash_tools.drafter.checkpoint_file import CONFIG_FILE, OWN_BLOCK, TENSOR_FILE, Layout
from dflash_tools.drafter.checkpoint_view import tensor_shapes
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.errors import ConfigError

EXPORT_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What an export says about where it comes from.

    Attributes:
        target: The target whose states the drafter was trained on.
        tokenizer: The target's tokenizer and chat template.
        data: What it was trained on, one entry a store.
        store_fingerprints: Identity of those stores.
        hidden_states_dtype: How the states were stored.
        step: Optimizer updates done.
    """

    target: TargetIdentity
    tokenizer: TokenizerIdentity
    data: tuple[DataIdentity, ...]
    store_fingerprints: tuple[str, ...]
    hidden_states_dtype: str
    step: int

    def to_dict(self) -> dict[str, Any]:
        """The ``dflash_tools`` block of the exported config."""
        quantization = self.target.quantization
        return {
            "version": __version__,
            "target": self.target.model_dump(mode="json"),
            "states": f"trained on {quantization}" if quantization else f"trained on {self.target.dtype} states",
            "hidden_states_dtype": self.hidden_states_dtype,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "chat_template_fingerprint": self.tokenizer.chat_template_fingerprint,
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_ids": list(self.tokenizer.eos_token_ids),
            "data": [one.model_dump(mode="json") for one in self.data],
            "store_fingerprints": list(self.store_fingerprints),
            "step": self.step,
        }


def zlab_config(config: DrafterConfig, provenance: Provenance) -> dict[str, Any]:
    """Build ``config.json`` of the z-lab layout: what SGLang, vLLM, llama.cpp and z-lab's package read.

    Source: docs/method.md, checkpoint contract. Every key that a loader would otherwise default is written.
    """
    eos = list(provenance.tokenizer.eos_token_ids)
    dflash = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
        **_layer_config(config),
        "bos_token_id": provenance.tokenizer.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        OWN_BLOCK: {**provenance.to_dict(), "num_draft_tokens": config.block_size - 1},
    }


def speculators_config(config: DrafterConfig, provenance: Provenance) -> dict[str, Any]:
    """Build ``config.json`` of the speculators layout, which vLLM serves without further options.

    Its layer ids count entries of ``hidden_states``, one more than decoder layers; the ``dflash_tools`` block says so.
    """
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": _layer_config(config),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": _dtype_name(EXPORT_DTYPE),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": provenance.target.model, "architectures": [provenance.target.architecture]},
        },
        OWN_BLOCK: {**provenance.to_dict(), "num_draft_tokens": config.block_size - 1, "layer_ids_are": "vllm"},
    }


def export_drafter(
    config: DrafterConfig,
    state: Mapping[str, Tensor],
    provenance: Provenance,
    folder: Path,
    *,
    layout: Layout = "zlab",
    card: str = "",
) -> list[str]:
    """Write a drafter folder: config, bfloat16 tensors and a card; nothing appears until all of it is checked.

    Args:
        config: The drafter.
        state: Its tensors by the names of the layout, in any float dtype. The target's embedding and head are not
            part of it: engines use the target's own.
        provenance: What the config says about target and data.
        folder: Must not exist, or be empty.
        layout: ``zlab`` or ``speculators``.
        card: Text of ``README.md``; "" writes none.

    Returns:
        What is worth knowing of the export, one sentence each: a mask token that was chosen although it is pad or eos,
        states of quantised weights.

    Raises:
        ConfigError: If the folder is used, a tensor is missing, of another shape or not finite in bfloat16, or a rule
            of ``check`` does not hold.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty; give a new folder or remove it")
    tensors = _cast(state, tensor_shapes(config.to_dict()))
    written = zlab_config(config, provenance) if layout == "zlab" else speculators_config(config, provenance)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, unfinished / TENSOR_FILE, metadata={"format": "pt"})
    # safetensors makes its file for the owner alone; whoever may read the config may serve the drafter.
    (unfinished / TENSOR_FILE).chmod((unfinished / CONFIG_FILE).stat().st_mode & 0o777)
    if card:
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    warnings = _require_sound(unfinished)
    if folder.exists():
        folder.rmdir()
    unfinished.replace(folder)
    return warnings


def _require_sound(folder: Path) -> list[str]:
    findings = check_folder(folder)
    # Training takes pad or eos as mask token only when told to, so here it is a choice, not an accident.
    faults = [str(finding) for finding in findings if not finding.ok and finding.rule != MASK_IS_RESERVED]
    if faults:
        shutil.rmtree(folder)
        raise ConfigError("the export would not serve, so nothing was written:\n" + "\n".join(faults))
    return [str(finding) for finding in findings if not finding.ok or finding.warning]


def _layer_config(config: DrafterConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "is_neox_style": True,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": _dtype_name(EXPORT_DTYPE),
    }


def _cast(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or unknown:
        raise ConfigError(f"drafter tensors do not fit its config: missing {missing[:3]}, unknown {unknown[:3]}")
    cast: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = state[name].detach().to("cpu", EXPORT_DTYPE).contiguous().clone()
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"drafter tensor {name} has shape {tuple(tensor.shape)}, its config says {shape}")
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"drafter tensor {name} holds NaN or infinity; export an earlier checkpoint")
        cast[name] = tensor
    return cast


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
