"""``extraction.json``: what an unfinished store is of, written once every place is chosen and every token written.

A later start compares its own settings with these: equal ones go on, others are refused by field.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_tools.contracts.manifest import Accounting, BucketLayout, DataIdentity, TokenizerIdentity
from dflash_tools.errors import ResumeError, StoreError
from dflash_tools.store import sealed
from dflash_tools.store.files import write_file

RECORD_NAME = "extraction.json"
RECORD_SCHEMA_VERSION = 1


class ExtractionRecord(BaseModel):
    """All that finishing a store needs, apart from the target itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = RECORD_SCHEMA_VERSION
    settings: dict[str, Any]  # what decides the content: option -> value
    versions: dict[str, str]  # library -> version
    threads: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    tokenizer: TokenizerIdentity
    data: DataIdentity
    accounting: Accounting
    notes: dict[str, int]  # kept rows with a note, e.g. truncated
    buckets: tuple[BucketLayout, ...]
    index_fingerprint: str
    closed: bool = False  # finished, or being finished, over the shards that were there
    checksum: str = ""  # SHA-256 of this document with the field blank


def write_record(store: Path, record: ExtractionRecord) -> None:
    """Write ``extraction.json``, whole or not at all."""
    text = record.model_copy(update={"checksum": ""}).model_dump_json(indent=2)
    write_file(store / RECORD_NAME, [sealed.seal(text)])


def read_record(store: Path) -> ExtractionRecord | None:
    """Read ``extraction.json``; None if preparation never came to its end.

    Raises:
        StoreError: If the file is damaged or of another version.
    """
    path = store / RECORD_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    fault = sealed.find_fault(content)
    if fault is not None:
        raise StoreError(f"{path}: {fault}. Run extract with --repair")
    found = json.loads(content).get("schema_version")
    if found != RECORD_SCHEMA_VERSION:
        raise StoreError(f"{path}: schema version {found}, this program reads {RECORD_SCHEMA_VERSION}; extract anew")
    try:
        return ExtractionRecord.model_validate_json(content)
    except ValidationError as error:
        fields = ", ".join(".".join(str(part) for part in problem["loc"]) for problem in error.errors())
        raise StoreError(f"{path}: unusable fields {fields}; extract anew with --overwrite") from None


def check_settings(store: Path, record: ExtractionRecord, settings: dict[str, Any]) -> None:
    """Refuse to go on with a store of another configuration.

    Raises:
        StoreError: Naming each field that differs, with both values.
    """
    # Through JSON, so that a tuple equals the list it was written as.
    wanted = json.loads(json.dumps(settings))
    names = sorted({*record.settings, *wanted})
    differing = [
        f"{name}: store has {_show(record.settings.get(name))}, now {_show(wanted.get(name))}"
        for name in names
        if record.settings.get(name) != wanted.get(name)
    ]
    if differing:
        raise StoreError(
            f"{store}: this store is of another configuration ({'; '.join(differing)}). Use that configuration, "
            "another folder, or --overwrite to remove what is there"
        )


def check_versions(store: Path, record: ExtractionRecord, versions: dict[str, str]) -> None:
    """Refuse to go on under other library versions: the states could differ inside one store.

    Raises:
        ResumeError: Naming each library with both versions.
    """
    differing = [
        f"{name} {record.versions.get(name, 'absent')} -> {version}"
        for name, version in versions.items()
        if record.versions.get(name) != version
    ]
    if differing:
        raise ResumeError(
            f"{store}: begun under other versions ({', '.join(differing)}), so new states could differ from those "
            "that are there. Install those versions, or extract into another folder"
        )


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
