"""Load a drafter from a folder: our export, or a checkpoint released in the z-lab or the speculators layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_tools.drafter.check_config import (
    SIZES,
    attention_is_plain,
    direction_overrides,
    rope_extras,
    rope_types,
    variant_keys,
)
from dflash_tools.drafter.checkpoint_file import (
    TARGET_COPIES,
    VOCABULARY_MAPS,
    CheckpointFile,
    LayerIdConvention,
    read_checkpoint_file,
)
from dflash_tools.drafter.checkpoint_view import layer_id_convention, rope_thetas, zlab_view
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.model import DFlashDrafter
from dflash_tools.errors import ConfigError

Weights = dict[str, Tensor]


def load_drafter(
    folder: Path, *, layer_ids_are: LayerIdConvention | None = None, num_target_layers: int | None = None
) -> tuple[DrafterConfig, DFlashDrafter]:
    """Load a drafter.

    Args:
        folder: Holds ``config.json`` and safetensors.
        layer_ids_are: How its layer ids count, where the file cannot tell: ``zlab`` (decoder layers from 0) or
            ``vllm`` (entries of ``hidden_states``, one more).
        num_target_layers: Depth of the target, for files that do not say it.

    Returns:
        Its configuration, and the drafter in the dtype of the file.

    Raises:
        ConfigError: If a value is missing, the drafter is of a form that this project does not run, or the tensors are
            not those of the config.
    """
    file = read_checkpoint_file(folder)
    config = released_config(file, layer_ids_are=layer_ids_are, num_target_layers=num_target_layers)
    state = {name: tensor for name, tensor in file.read() if name not in (*TARGET_COPIES, *VOCABULARY_MAPS)}
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    _require_same(folder, drafter.state_dict(), state)
    drafter.load_state_dict(state, assign=True)
    return config, drafter.requires_grad_(False).eval()


def initial_weights(folder: Path, config: DrafterConfig, *, layer_ids_are: LayerIdConvention | None = None) -> Weights:
    """Read the weights of an exported or released drafter to go on training from them.

    Args:
        folder: The drafter.
        config: The drafter to train; only its block size and longest position may differ.
        layer_ids_are: How layer ids of the folder count, where it cannot tell.

    Returns:
        Its tensors in float32.

    Raises:
        ConfigError: If the two differ, naming each field with both values.
    """
    found, drafter = load_drafter(folder, layer_ids_are=layer_ids_are, num_target_layers=config.num_target_layers)
    free = ("block_size", "max_position_embeddings", "initializer_range")
    ours, theirs = config.to_dict(), found.to_dict()
    differing = [key for key in ours if ours[key] != theirs[key] and key not in free]
    if differing:
        named = ", ".join(f"{key} {theirs[key]} there, {ours[key]} here" for key in differing)
        raise ConfigError(f"drafter.init_from = {str(folder)!r}: {named}; set those keys of [drafter] to its values")
    return {name: tensor.float() for name, tensor in drafter.state_dict().items()}


def released_config(
    file: CheckpointFile, *, layer_ids_are: LayerIdConvention | None = None, num_target_layers: int | None = None
) -> DrafterConfig:
    """Read a drafter's configuration, refusing what a plain DFlash drafter cannot be.

    Args:
        file: The drafter folder.
        layer_ids_are: How its layer ids count, where the file cannot tell.
        num_target_layers: Depth of the target, for files that do not say it.

    Raises:
        ConfigError: If a value is missing or the drafter is of another form.
    """
    convention = layer_id_convention(file, layer_ids_are)
    if convention is None:
        raise ConfigError(
            f"{file.folder}: layer ids {file.config.get('aux_hidden_state_layer_ids')} exist in both conventions and "
            "the file cannot tell which; add --layer-ids-are zlab (decoder layers from 0) or vllm (one more)"
        )
    view = zlab_view(file, convention)
    _require_plain(file, view)
    needed = [*SIZES, "rms_norm_eps", "max_position_embeddings", "block_size", "mask_token_id", "target_layer_ids"]
    missing = [key for key in needed if view.get(key) is None]
    thetas = set(rope_thetas(view).values())
    if missing or len(thetas) != 1:
        problem = f"{', '.join(missing)} missing" if missing else f"rope_theta is {sorted(thetas) or 'not stated'}"
        raise ConfigError(f"{file.folder}/config.json: {problem}; run dflash-tools check on it and mend the file")
    layer_types = tuple(view.get("layer_types") or ("full_attention",) * view["num_hidden_layers"])
    depth = view.get("num_target_layers") or num_target_layers or max(view["target_layer_ids"]) + 2
    return DrafterConfig(
        **{key: int(view[key]) for key in SIZES},
        rms_norm_eps=float(view["rms_norm_eps"]),
        rope_theta=thetas.pop(),
        max_position_embeddings=int(view["max_position_embeddings"]),
        initializer_range=float(view.get("initializer_range") or 0.02),
        layer_types=layer_types,
        sliding_window=view.get("sliding_window") if "sliding_attention" in layer_types else None,
        block_size=int(view["block_size"]),
        mask_token_id=int(view["mask_token_id"]),
        target_layer_ids=tuple(view["target_layer_ids"]),
        num_target_layers=int(depth),
    )


def _require_plain(file: CheckpointFile, view: Mapping[str, Any]) -> None:
    overrides, variants = direction_overrides(file), variant_keys(file)
    kinds, extras = rope_types(view), rope_extras(view)
    rows, act = view.get("vocab_size"), view.get("hidden_act", "silu")
    reasons = {
        f"architectures {file.config.get('architectures')}": file.config.get("architectures")
        not in (["DFlashDraftModel"], ["DFlashSpeculator"]),
        f"{variants}": bool(variants),
        f"{overrides}": not attention_is_plain(overrides, view.get("layer_types") or ()),
        f"rope type {', '.join(sorted(kinds))}": kinds != {"default"},
        f"rotary embedding with {', '.join(extras)}": bool(extras),
        "is_neox_style false": view.get("is_neox_style") is False,
        f"hidden_act {act!r}": act != "silu",
        f"draft_vocab_size {file.config.get('draft_vocab_size')} of {rows}": file.config.get("draft_vocab_size", rows)
        != rows,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f"{file.folder}: {'; '.join(found)} is a form of drafter that is not run here; "
            "give a plain DFlash drafter (architecture DFlashDraftModel or DFlashSpeculator)"
        )


def _require_same(folder: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape]
    if missing or unknown or wrong:
        raise ConfigError(
            f"{folder}: tensors do not fit the config: {len(missing)} missing {missing[:2]}, {len(unknown)} unknown "
            f"{unknown[:2]}, {len(wrong)} of another shape {sorted(wrong)[:2]}; run dflash-tools check on it"
        )
