"""What a conversion is about to do, resolved before any file of the cache is read and any weight loaded."""

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_tools import __version__
from dflash_tools.config import TargetSection
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.manifest import Codec, HiddenStatesDtype, TokenizerIdentity
from dflash_tools.convert.cache_file import CacheFile, list_files
from dflash_tools.convert.layouts import LAYOUTS, CacheLayout, LayoutName, NormState
from dflash_tools.convert.masks import ArrowMasks, find_dataset
from dflash_tools.data import load_tokenizer, tokenizer_identity
from dflash_tools.errors import ConfigError
from dflash_tools.store.arrays import StoreShape
from dflash_tools.target.config_only import TargetShape, read_target_config, shape_of_config
from dflash_tools.target.layers import choose_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LayerIdsAre = Literal["zlab", "vllm"]
LIBRARIES = ("torch", "safetensors", "numpy", "polars", "numcodecs")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user says about a cache, and how the store is to be; docs/convert.md explains each."""

    target: TargetSection
    target_layer_ids: Sequence[int]
    layer_ids_are: LayerIdsAre | None
    keep_last_hidden_state: bool
    last_hidden_state_is: NormState | None
    masks: Path | None
    loss_on: Literal["all"] | None
    hidden_states_dtype: HiddenStatesDtype
    codec: Codec
    num_buckets: int
    validation_fraction: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A conversion, resolved.

    Attributes:
        source: Folder of the cache.
        files: Its files, in order of their names.
        num_other_files: Files beside them that are not of the cache.
        layout: Where a file keeps what.
        masks: Loss masks that lie apart from the states.
        supervise_all: Every token of a file without a mask is supervised.
        options: As given.
        tokenizer: The target's.
        tokenizer_identity: What names it in the manifest.
        target: Sizes of the target.
        layer_ids: Cached decoder layers from 0, in the order of the cache.
        last_norm: Norm state of the last hidden state; None = it is not kept.
        shape: Width and codec of the stored states.
        settings: What decides the content of the store.
        versions: Libraries that write it.
    """

    source: Path
    files: tuple[CacheFile, ...]
    num_other_files: int
    layout: CacheLayout
    masks: ArrowMasks | None
    supervise_all: bool
    options: Options
    tokenizer: "PreTrainedTokenizerBase"
    tokenizer_identity: TokenizerIdentity
    target: TargetShape
    layer_ids: tuple[int, ...]
    last_norm: NormState | None
    shape: StoreShape
    settings: dict[str, Any]
    versions: dict[str, str]


def resolve_job(source: Path, layout_name: LayoutName, options: Options) -> Job:
    """Resolve options, list files, read the target's config and tokenizer.

    Raises:
        ConfigError: If an option is missing or does not fit the target.
        DataError: If the cache or its masks cannot be opened.
    """
    source = source.absolute()
    layout = LAYOUTS[layout_name]
    convention = check_convention(options.layer_ids_are)
    files, num_others = list_files(source, layout.suffixes)
    masks = _open_masks(source, layout_name, options)
    target = shape_of_config(read_target_config(options.target))
    layer_ids = resolve_layer_ids(options.target_layer_ids, convention, target.num_hidden_layers)
    tokenizer = load_tokenizer(
        options.target.model,
        revision=options.target.revision,
        gguf_file=options.target.gguf_file,
        trust_remote_code=options.target.trust_remote_code,
    )
    identity = tokenizer_identity(tokenizer)
    last_norm = (options.last_hidden_state_is or layout.last_norm) if options.keep_last_hidden_state else None
    return Job(
        source=source,
        files=tuple(files),
        num_other_files=num_others,
        layout=layout,
        masks=masks,
        supervise_all=options.loss_on == "all",
        options=options,
        tokenizer=tokenizer,
        tokenizer_identity=identity,
        target=target,
        layer_ids=layer_ids,
        last_norm=last_norm,
        shape=StoreShape(
            num_layers=len(layer_ids),
            hidden_size=target.hidden_size,
            hidden_states_dtype=options.hidden_states_dtype,
            codec=options.codec,
            last_hidden_state=last_norm is not None,
        ),
        settings={
            "--from": layout_name,
            "SOURCE": source.name,
            "files of SOURCE": describe_files(files),
            "--target": options.target.model,
            "--revision": options.target.revision,
            "--gguf-file": options.target.gguf_file,
            "--dtype": options.target.dtype,
            "target's config": target.config_fingerprint,
            "tokenizer": identity.fingerprint,
            "--target-layer-ids": list(layer_ids),
            "--last-hidden-state-is": last_norm,
            "--masks": masks.fingerprint if masks is not None else None,
            "--loss-on": options.loss_on,
            "--hidden-states-dtype": options.hidden_states_dtype,
            "--codec": options.codec,
            "--buckets": options.num_buckets,
            "--validation-fraction": options.validation_fraction,
        },
        versions={"dflash-tools": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in LIBRARIES},
    )


def check_convention(layer_ids_are: LayerIdsAre | None) -> LayerIdsAre:
    """Ask for the convention of layer ids.

    Raises:
        ConfigError: If it was not given; both are explained.
    """
    if layer_ids_are is None:
        raise ConfigError(
            "--layer-ids-are is missing: no file of a cache says how its layers are counted. Give zlab if id 1 means "
            "the output of decoder layer 1 counted from 0 (SpecForge, Model-Optimizer), vllm if it means entry 1 of "
            "hidden_states, which is one layer lower (speculators, vLLM)"
        )
    return layer_ids_are


def _open_masks(source: Path, layout_name: LayoutName, options: Options) -> ArrowMasks | None:
    if options.masks is not None and options.loss_on is not None:
        raise ConfigError("--masks and --loss-on all contradict each other; give one of them")
    if options.masks is not None:
        return ArrowMasks(options.masks)
    found = find_dataset(source) if layout_name == "speculators" and options.loss_on is None else None
    return ArrowMasks(found) if found is not None else None


def describe_files(files: Sequence[CacheFile]) -> str:
    """Count files and bytes, and hash names and sizes, in words that a person can compare."""
    num_bytes = sum(file.num_bytes for file in files)
    fingerprint = fingerprint_of_json([[file.name, file.num_bytes] for file in files])
    return f"{len(files)} files of {num_bytes} bytes in all, names and sizes {fingerprint[:16]}"


def resolve_layer_ids(layer_ids: Sequence[int], layer_ids_are: LayerIdsAre, num_hidden_layers: int) -> tuple[int, ...]:
    """Bring layer ids to the one convention of a store: the output of decoder layer i, counted from 0.

    Args:
        layer_ids: As the tool that made the cache was told, in the order of the cache.
        layer_ids_are: ``zlab``: output of layer i is i; ``vllm``: it is i + 1, as in transformers' ``hidden_states``.
        num_hidden_layers: Decoder layers of the target.

    Raises:
        ConfigError: If an id is none of the target's.
    """
    shift = 1 if layer_ids_are == "vllm" else 0
    try:
        return choose_layers([layer - shift for layer in layer_ids], 0, num_hidden_layers)
    except ConfigError as error:
        raise ConfigError(
            f"--target-layer-ids {','.join(map(str, layer_ids))} with --layer-ids-are {layer_ids_are} are "
            f"the outputs of layers {[layer - shift for layer in layer_ids]} counted from 0: {error}. The last hidden "
            "state has no id here"
        ) from None
