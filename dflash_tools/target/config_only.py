"""What the target's config says, before any weight is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_tools.config import TargetSection, resolve_model_folder
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.errors import ConfigError

# Keys that say where a config came from, not what the model computes.
_ORIGIN_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Sizes of a target."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    config_fingerprint: str
    has_linear_attention: bool
    max_tokens: int | None  # positions the target knows; None = its config does not say


def read_target_config(section: TargetSection) -> Any:
    """Read the transformers config of a target.

    Raises:
        ConfigError: If the model is not found, or transformers does not know its architecture.
    """
    from transformers import AutoConfig

    folder = resolve_model_folder(section.model)
    options: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    if section.gguf_file is not None:
        check_gguf(section, folder)
        options["gguf_file"] = section.gguf_file
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target.model = {section.model!r}: {_first_line(error)}; correct it in the config") from None


def shape_of_config(config: Any) -> TargetShape:
    """Sizes of the text model; a multimodal config is resolved to its text part."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ()
    return TargetShape(
        model_type=text.model_type,
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        config_fingerprint=config_fingerprint(config),
        has_linear_attention=any("linear" in kind or "mamba" in kind for kind in layer_types),
        max_tokens=getattr(text, "max_position_embeddings", None),
    )


def config_fingerprint(config: Any) -> str:
    """Identity of what the model computes, apart from its weights. Returns 64 hex digits."""
    content = config.to_dict()
    for table in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in _ORIGIN_KEYS:
            table.pop(key, None)
    return fingerprint_of_json(_plain(content))


def check_gguf(section: TargetSection, folder: str) -> None:
    """Refuse a GGUF file early: missing, or of an architecture that transformers does not read.

    Raises:
        ConfigError: With the list of architectures that transformers reads.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    path = Path(folder) / str(section.gguf_file)
    if Path(folder).is_dir() and not path.is_file():
        found = sorted(file.name for file in Path(folder).glob("*.gguf"))
        raise ConfigError(f"target.gguf_file = {section.gguf_file!r}: not in {folder}, which holds {found}; correct it")
    if not path.is_file():
        return  # a hub repository: transformers fetches the file and checks
    architecture = gguf_field(path, "general.architecture")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{path}: GGUF architecture {architecture!r} is not one that transformers reads "
            f"({', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}); use the original checkpoint"
        )


def gguf_field(path: Path, name: str) -> Any:
    """Read one metadata field of a GGUF file; None if it has no such field.

    Raises:
        ConfigError: If the file is no GGUF file.
    """
    fields = _gguf_reader(path).fields
    return fields[name].contents() if name in fields else None


def gguf_quantization(path: Path) -> str:
    """Name the type of most weights of a GGUF file, e.g. ``Q4_1``."""
    sizes: dict[str, int] = {}
    for tensor in _gguf_reader(path).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])


def _gguf_reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: reading GGUF needs a package; run: pip install gguf") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error}); check the download") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
