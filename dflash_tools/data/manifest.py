"""From the [data] table and a data manifest to settings that have no gaps."""

from dataclasses import dataclass
from pathlib import Path

from dflash_tools.config import DataManifest, DataSection, SourceEntry, load_config, resolve_path
from dflash_tools.errors import ConfigError

DEFAULT_MAX_TOKENS = 8192
PYTHON_REFERENCE = "python:pydoc_data.topics"
HUB_PREFIX = "hub:"

KwargValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSource:
    """One source, ready to be read.

    Attributes:
        name: As written in the manifest or in ``data.sources``.
        paths: Files in reading order; empty for ``python:`` and ``hub:`` sources.
        file_names: What each file is called in results; a folder's or glob's files by their path below it.
        limit: Read at most this many rows.
        weight: Share of rows taken; above 1, rows are repeated.
        loss_on: ``assistant`` or ``all``.
    """

    name: str
    paths: tuple[Path, ...] = ()
    file_names: tuple[str, ...] = ()
    limit: int | None = None
    weight: float = 1.0
    loss_on: str = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedData:
    """Every data setting, filled: the section's value, else the manifest's, else the default."""

    name: str
    sources: tuple[ResolvedSource, ...]
    license: str = ""
    origin: str = ""
    chat_template: str | None = None  # text of the file; None = the tokenizer's own
    chat_template_kwargs: dict[str, KwargValue]
    max_tokens: int = DEFAULT_MAX_TOKENS
    too_long: str = "truncate"
    loss_on: str = "assistant"
    history: str = "expand"
    control_tokens: str = "text"
    duplicates: str = "keep"
    validation_fraction: float = 0.0
    min_validation_samples: int = 0

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources, in reading order."""
        return tuple(source.name for source in self.sources)


def resolve_data(section: DataSection, config_dir: Path) -> ResolvedData:
    """Fill every data setting.

    Args:
        section: The [data] table.
        config_dir: Folder of the config file; paths are relative to it, then to the working folder.

    Raises:
        ConfigError: If there is no source, a file is missing, or a manifest does not fit.
    """
    manifest, manifest_dir = _read_manifest(section, config_dir)
    default_loss_on = (manifest and manifest.loss_on) or "assistant"
    if section.sources:
        entries: tuple[SourceEntry, ...] = tuple(SourceEntry(path=path) for path in section.sources)
        base = config_dir
    else:
        entries, base = (manifest.sources if manifest else ()), manifest_dir
    if not entries:
        raise ConfigError("data: no sources; set data.manifest to a data manifest or data.sources to a list of files")
    kwargs = section.chat_template_kwargs
    if kwargs is None and manifest is not None:
        kwargs = manifest.chat_template_kwargs
    return ResolvedData(
        name=manifest.name if manifest else "sources",
        sources=tuple(
            _resolve_source(entry, base, section.loss_on or entry.loss_on or default_loss_on) for entry in entries
        ),
        license=manifest.license if manifest else "",
        origin=manifest.origin if manifest else "",
        chat_template=_read_template(section, manifest, config_dir, manifest_dir),
        chat_template_kwargs=dict(kwargs or {}),
        max_tokens=section.max_tokens or (manifest and manifest.max_tokens) or DEFAULT_MAX_TOKENS,
        too_long=section.too_long or (manifest and manifest.too_long) or "truncate",
        loss_on=section.loss_on or default_loss_on,
        history=section.history or (manifest and manifest.history) or "expand",
        control_tokens=section.control_tokens or (manifest and manifest.control_tokens) or "text",
        duplicates=section.duplicates or (manifest and manifest.duplicates) or "keep",
        validation_fraction=section.validation_fraction,
        min_validation_samples=section.min_validation_samples,
    )


def _read_manifest(section: DataSection, config_dir: Path) -> tuple[DataManifest | None, Path]:
    if section.manifest is None:
        return None, config_dir
    path = resolve_path(section.manifest, config_dir)
    return load_config(path, DataManifest), path.parent


def _read_template(
    section: DataSection, manifest: DataManifest | None, config_dir: Path, manifest_dir: Path
) -> str | None:
    if section.chat_template:
        path = resolve_path(section.chat_template, config_dir)
    elif manifest is not None and manifest.chat_template:
        path = resolve_path(manifest.chat_template, manifest_dir)
    else:
        return None
    return path.read_text(encoding="utf-8")


def _resolve_source(entry: SourceEntry, base: Path, loss_on: str) -> ResolvedSource:
    from dflash_tools.data.files import find_files

    named = entry.path.startswith(HUB_PREFIX) or entry.path == PYTHON_REFERENCE
    files = {} if named else find_files(entry.path, base)
    return ResolvedSource(
        name=entry.path,
        paths=tuple(files.values()),
        file_names=tuple(files),
        limit=entry.limit,
        weight=entry.weight or 1.0,
        loss_on=loss_on,
    )
