"""What decides the content of a store, as one flat table; and the versions that made it."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from dflash_tools import __version__
from dflash_tools.config import ExtractConfig
from dflash_tools.contracts.fingerprint import checksum_of_file, fingerprint_of_json
from dflash_tools.contracts.manifest import DataIdentity, TokenizerIdentity
from dflash_tools.data import ResolvedData

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "polars", "numcodecs")
# Where the forward runs, not what it computes.
_PLACE_KEYS = ("device", "device_map")


def content_settings(
    config: ExtractConfig,
    data: ResolvedData,
    tokenizer: TokenizerIdentity,
    config_fingerprint: str,
    target_layer_ids: tuple[int, ...],
    limit: int | None,
) -> dict[str, Any]:
    """Collect every setting that changes ids, masks, states or layout: option -> JSON-able value."""
    target = config.target.model_dump(mode="json", exclude={*_PLACE_KEYS, "target_layer_ids", "num_target_features"})
    table = {f"target.{name}": value for name, value in target.items()}
    table["target.target_layer_ids"] = list(target_layer_ids)
    table["target's config"] = config_fingerprint
    table["tokenizer"] = tokenizer.fingerprint
    table["chat template"] = tokenizer.chat_template_fingerprint
    for name in DATA_SETTINGS:
        table[f"data.{name}"] = getattr(data, name)
    table["data.sources"] = [[source.name, source.limit, source.weight, source.loss_on] for source in data.sources]
    table["data files"] = files_fingerprint(data)
    table |= {f"buckets.{name}": value for name, value in config.buckets.model_dump(mode="json").items()}
    table["forward.token_budget"] = config.forward.token_budget
    table |= {f"store.{name}": value for name, value in config.store.model_dump(mode="json").items()}
    table["--limit"] = limit
    return table


DATA_SETTINGS = (
    "name",
    "chat_template_kwargs",
    "max_tokens",
    "too_long",
    "loss_on",
    "history",
    "control_tokens",
    "duplicates",
    "validation_fraction",
    "min_validation_samples",
)


def files_fingerprint(data: ResolvedData) -> str:
    """Hash names and bytes of all input files. Returns 64 hex digits."""
    return fingerprint_of_json(
        [
            [name, path.stat().st_size, checksum_of_file(Path(path))]
            for source in data.sources
            for name, path in zip(source.file_names, source.paths, strict=True)
        ]
    )


def data_identity(data: ResolvedData, content_fingerprint: str) -> DataIdentity:
    """Describe the data for the manifest."""
    return DataIdentity(
        name=data.name,
        sources=data.source_names,
        content_fingerprint=content_fingerprint,
        chat_template_kwargs=data.chat_template_kwargs,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        loss_on=data.loss_on,
        validation_fraction=data.validation_fraction,
    )


def library_versions() -> dict[str, str]:
    """Versions of what makes the bits of a store."""
    versions = {"dflash-tools": __version__, "python": platform.python_version()}
    return versions | {name: importlib.metadata.version(name) for name in LIBRARIES}
