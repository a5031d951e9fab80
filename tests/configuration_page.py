"""Write the configuration page: ``python tests/configuration_page.py > docs/configuration.md``."""

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dflash_tools.config import DataManifest, ExtractConfig, GenerateConfig, Section, TrainConfig

HEAD = """# Configuration

Every option of the four files, its default and its effect. An unknown key is an error that names the nearest known
one. Paths are relative to the file they stand in, then to the working folder. `--set table.key=value` overrides a key.
"""


def configuration_page() -> str:
    parts = [HEAD]
    for title, model in (
        ("generate.toml", GenerateConfig),
        ("extract.toml", ExtractConfig),
        ("train.toml", TrainConfig),
        ("Data manifest", DataManifest),
    ):
        parts.append(f"## {title}\n")
        parts.extend(_tables(model))
    return "\n".join(parts)


def _tables(model: type[BaseModel]) -> list[str]:
    parts = []
    plain = {name: field for name, field in model.model_fields.items() if _section(field) is None}
    if plain:
        parts.append(_table(plain))
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            parts.append(f"### `[{name}]`\n\n{section.__doc__}\n")
            parts.append(_table(section.model_fields))
    return parts


def _section(field: FieldInfo) -> type[Section] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| option | default | effect |", "|---|---|---|"]
    for name, field in fields.items():
        assert field.description, f"{name} has no description"
        default = "required" if field.default is PydanticUndefined else f"`{_toml(field.default)}`"
        effect = " ".join(field.description.split())
        rows.append(f"| `{name}` | {default} | {effect} |")
    return "\n".join(rows) + "\n"


def _toml(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


if __name__ == "__main__":
    print(configuration_page(), end="")
