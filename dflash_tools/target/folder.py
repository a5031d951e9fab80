"""``STORE/target/``: all that training needs of the target, so that it needs neither the model nor a hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_tools.errors import StoreError
from dflash_tools.target.load import Target
from dflash_tools.target.self_test import probe_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FROZEN_FILE = "frozen.safetensors"
PROBE_FILE = "probe.json"
NUM_PROBE_TOKENS = 16


def write_target_folder(target: Target, tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write config, generation config, tokenizer, frozen tensors and probe logits.

    Equal targets give equal bytes: no path, version or time is kept.

    Args:
        target: A loaded target.
        tokenizer: Its tokenizer, with the chat template that made the samples.
        folder: Made if it is not there; files in it are replaced.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {**target.model.config.to_dict(), "architectures": [target.identity.architecture]}
    config["dtype"] = target.identity.dtype
    _write_json(folder / "config.json", _without_origin(config))
    generation = target.model.generation_config
    _write_json(folder / "generation_config.json", _without_origin(generation.to_dict() if generation else {}))
    tokenizer.save_pretrained(folder)
    save_file(frozen_tensors(target), folder / FROZEN_FILE)
    _write_json(folder / PROBE_FILE, probe_logits(target))


def frozen_tensors(target: Target) -> dict[str, Tensor]:
    """Embedding rows, final norm as a plain factor, and the head unless it is tied to the embedding.

    Rows are raw: an embedding module that scales its output (Gemma) keeps its factor to itself.

    Raises:
        StoreError: If the final norm is not a factor (and bias) after normalisation.
    """
    embedding, head = target.embedding, target.head
    weight, head_weight = embedding.weight, head.weight
    assert isinstance(weight, Tensor)
    assert isinstance(head_weight, Tensor)
    tensors = {"embed_tokens.weight": weight, "norm.weight": norm_factor(target.final_norm)}
    norm_bias, head_bias = getattr(target.final_norm, "bias", None), getattr(head, "bias", None)
    if norm_bias is not None:
        tensors["norm.bias"] = norm_bias
    if head_weight is not weight and head_weight.data_ptr() != weight.data_ptr():
        tensors["lm_head.weight"] = head_weight
    if head_bias is not None:
        tensors["lm_head.bias"] = head_bias
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@torch.inference_mode()
def norm_factor(norm: nn.Module) -> Tensor:
    """The vector a norm multiplies with: its weight, or 1 + weight as in Gemma; found by trying. Shape: (H,)."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    values = torch.linspace(-2.0, 2.0, weight.numel(), device=weight.device, dtype=torch.float32).roll(1)
    got = norm(values.to(weight.dtype)[None])[0].float()
    bias = getattr(norm, "bias", None)
    centred = values - values.mean() if bias is not None else values
    if bias is not None:
        got = got - bias.float()
    normed = centred / centred.square().mean().sqrt()
    for factor in (weight, 1.0 + weight.float()):
        if torch.allclose(normed * factor.float(), got, rtol=0.05, atol=0.05):
            return factor.to(weight.dtype)
    raise StoreError(f"the target's final norm, {type(norm).__name__}, is not a factor after normalisation; report it")


@torch.inference_mode()
def probe_logits(target: Target) -> dict[str, list[Any]]:
    """Top-1 token and its lead over the second, at each position of a fixed prompt: "same target?" in a second."""
    ids_BT = probe_ids(target, NUM_PROBE_TOKENS)
    logits_TV = target.model(input_ids=ids_BT, use_cache=False).logits[0].float()
    top_T2 = logits_TV.topk(2, dim=-1)
    gaps = (top_T2.values[:, 0] - top_T2.values[:, 1]).tolist()
    return {
        "input_ids": ids_BT[0].tolist(),
        "top1": top_T2.indices[:, 0].tolist(),
        "gap": [round(gap, 3) for gap in gaps],
    }


def _without_origin(table: dict[str, Any]) -> dict[str, Any]:
    origin = ("_name_or_path", "transformers_version", "quantization_config", "_from_model_config", "_commit_hash")
    return {key: value for key, value in table.items() if key not in origin}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
