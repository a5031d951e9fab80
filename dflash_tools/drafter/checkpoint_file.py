"""A drafter folder on disk, in either public layout: its config and its tensors' names, shapes and dtypes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_tools.errors import ConfigError

Layout = Literal["zlab", "speculators"]
LayerIdConvention = Literal["zlab", "vllm"]

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
TENSOR_INDEX_FILE = "model.safetensors.index.json"
OWN_BLOCK = "dflash_tools"  # what this project adds to a config: where the drafter comes from

# Frozen copies of the target that the speculators layout carries; the drafter itself does not need them.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight")
VOCABULARY_MAPS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint, not loaded.

    Attributes:
        shape: Its shape.
        dtype: Its dtype by the names of safetensors, e.g. ``BF16``.
        path: The file that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A drafter folder as it was found.

    Attributes:
        folder: Where it lies.
        config: ``config.json``, unchanged.
        tensors: Every tensor by its name in the file.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def layout(self) -> Layout:
        """``speculators`` nests the layer sizes and names its model type; everything else is the z-lab layout."""
        nested = "speculators_model_type" in self.config or "transformer_layer_config" in self.config
        return "speculators" if nested else "zlab"

    @property
    def num_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(path.stat().st_size for path in {entry.path for entry in self.tensors.values()})

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Read every tensor, one at a time."""
        for path in sorted({entry.path for entry in self.tensors.values()}):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


def read_checkpoint_file(folder: Path) -> CheckpointFile:
    """Read the config and the tensor headers of a drafter folder.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors`` (or its shards with an index).

    Raises:
        ConfigError: If a file is missing, damaged, or names a shard that is not there.
    """
    config = _read_json(folder / CONFIG_FILE)
    _check_kinds(config, folder / CONFIG_FILE)
    tensors: dict[str, TensorEntry] = {}
    for path in _tensor_paths(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    view = file.get_slice(name)
                    tensors[name] = TensorEntry(shape=tuple(view.get_shape()), dtype=view.get_dtype(), path=path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: damaged ({error}); fetch or export it again") from None
    return CheckpointFile(folder=folder, config=config, tensors=tensors)


def _tensor_paths(folder: Path) -> list[Path]:
    single, index = folder / TENSOR_FILE, folder / TENSOR_INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"{folder}: neither {TENSOR_FILE} nor {TENSOR_INDEX_FILE}; give the folder of a drafter")
    paths = sorted({folder / name for name in _read_json(index).get("weight_map", {}).values()})
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise ConfigError(f"{index}: names {', '.join(missing) or 'no files'}, which are not there; fetch them")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no {path.name}; give the folder of a drafter") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); fetch or export it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, expected a JSON object; fetch or export it again")
    return value


# What later rules compute with; everything else is compared, and any value can be compared.
_OBJECTS = ("dflash_config", "transformer_layer_config", "rope_parameters", "rope_scaling", "dflash_tools")
_WHOLE_NUMBERS = ("target_layer_ids", "aux_hidden_state_layer_ids")
_NUMBERS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "block_size")


def _check_kinds(config: dict[str, Any], path: Path) -> None:
    """Refuse values of a kind that no rule could be held against."""
    for key, value in _flat_items(config):
        if value is None:
            continue
        if key in _OBJECTS:
            fits, expected = isinstance(value, dict), "an object"
        elif key in _WHOLE_NUMBERS:
            fits = isinstance(value, list) and all(type(item) is int for item in value)
            expected = "a list of whole numbers"
        elif key == "layer_types":
            fits, expected = isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of names"
        elif key in _NUMBERS:
            fits, expected = type(value) is int, "a whole number"
        else:
            continue
        if not fits:
            raise ConfigError(f"{path}: {key} is {value!r}, expected {expected}; fetch or export it again")


def _flat_items(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        yield key, value
        if key in _OBJECTS and isinstance(value, dict):
            yield from value.items()
