"""Configs of released drafters, written by hand after the published facts, with widths scaled down.

Depths, layer ids, block size, windows, theta and mask ids are the published ones; hidden size, heads and vocabulary
shrink, and mask ids shrink with the vocabulary (the last row).
"""

import json
from pathlib import Path

HIDDEN, HEAD_DIM, ROWS = 32, 8, 64


def qwen3_8b() -> dict:
    """After z-lab/Qwen3-8B-DFlash-b16: block_size at the top level, all layers full."""
    return _layers(5, theta=1e6, max_positions=40960) | {
        "block_size": 16,
        "dflash_config": {"mask_token_id": ROWS - 1, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36,
    }


def qwen36_27b() -> dict:
    """After z-lab/Qwen3.6-27B-DFlash: block_size nested, four sliding layers and a full one."""
    return _layers(5, theta=1e7, max_positions=262144) | {
        "dflash_config": {"mask_token_id": ROWS - 1, "target_layer_ids": [1, 16, 31, 46, 61], "block_size": 16},
        "num_target_layers": 64,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    }


def qwen35_35b_a3b() -> dict:
    """After z-lab/Qwen3.5-35B-A3B-DFlash: six layers on eight target layers."""
    return _layers(6, theta=1e7, max_positions=262144) | {
        "dflash_config": {
            "mask_token_id": ROWS - 1,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            "block_size": 16,
        },
        "num_target_layers": 40,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 4096,
        "use_sliding_window": True,
    }


def write_released(folder: Path, config: dict, *, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Write a config and random tensors of the shapes it implies; names and shapes are spelled out here again."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    ids = config["dflash_config"]["target_layer_ids"]
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    wide = config["num_attention_heads"] * config["head_dim"]
    narrow = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"fc.weight": (hidden, len(ids) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (wide, hidden),
            f"{at}self_attn.k_proj.weight": (narrow, hidden),
            f"{at}self_attn.v_proj.weight": (narrow, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, wide),
            f"{at}self_attn.q_norm.weight": (config["head_dim"],),
            f"{at}self_attn.k_norm.weight": (config["head_dim"],),
            f"{at}mlp.gate_proj.weight": (mlp, hidden),
            f"{at}mlp.up_proj.weight": (mlp, hidden),
            f"{at}mlp.down_proj.weight": (hidden, mlp),
        }
    state = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[-1] ** 0.5)
        + (0.1 * torch.randn(shape) if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _layers(depth: int, *, theta: float, max_positions: int) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": depth,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": ROWS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": theta,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "layer_types": ["full_attention"] * depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": depth,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
