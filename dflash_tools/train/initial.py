"""The weights that a run starts from when it is told to go on from another drafter."""

from dataclasses import fields
from pathlib import Path

from torch import Tensor

from dflash_tools.drafter.checkpoint_file import read_checkpoint_file
from dflash_tools.drafter.checkpoint_view import layer_id_convention
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.released import load_drafter, released_config
from dflash_tools.errors import ConfigError

MAY_DIFFER = frozenset(
    {
        "block_size",
        "layer_types",
        "sliding_window",
        "max_position_embeddings",
        "initializer_range",
        "num_target_layers",
    }
)
"""What a drafter may be trained on with: other blocks, windows or lengths fit the same tensors."""


def check_initial(folder: Path, config: DrafterConfig) -> None:
    """Refuse a drafter whose weights mean something else in this run; reads its ``config.json`` alone.

    Args:
        folder: An export, or a checkpoint in the z-lab or the speculators layout.
        config: The drafter of this run.

    Raises:
        ConfigError: If the folder cannot be read, or a field differs; names each with both values.
    """
    file = read_checkpoint_file(folder)
    if layer_id_convention(file, None) is None:
        raise ConfigError(
            f"drafter.init_from = {folder}: its config.json does not say how aux_hidden_state_layer_ids count; add "
            '"dflash_tools": {"layer_ids_are": "vllm"} to it (entries of hidden_states, one more than the layer), or '
            '"zlab" (decoder layers from 0)'
        )
    found = released_config(file, num_target_layers=config.num_target_layers)
    names = [field.name for field in fields(DrafterConfig) if field.name not in MAY_DIFFER]
    differing = [
        f"{name} is {getattr(found, name)} there, {getattr(config, name)} in this run"
        for name in names
        if getattr(found, name) != getattr(config, name)
    ]
    if differing:
        raise ConfigError(
            f"drafter.init_from = {folder}: {'; '.join(differing)}. Set [drafter] to its values where the target "
            "allows it, or start from fresh weights"
        )


def load_initial(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Read the weights by name, in the dtype of the file.

    Raises:
        ConfigError: If tensors are missing or do not fit the config beside them.
    """
    _, drafter = load_drafter(folder, num_target_layers=config.num_target_layers)
    return drafter.state_dict()
