"""``conversion.json``: what an unfinished store is of, written once every place is chosen.

A later start compares its own settings with these: equal ones go on, others are refused by field.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_tools.contracts.manifest import BucketLayout, TargetIdentity, TokenizerIdentity
from dflash_tools.errors import StoreError
from dflash_tools.store import sealed
from dflash_tools.store.files import write_file

RECORD_NAME = "conversion.json"
RECORD_SCHEMA_VERSION = 1


class ConversionRecord(BaseModel):
    """All that finishing a store needs beside its index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = RECORD_SCHEMA_VERSION
    settings: dict[str, Any]  # what decides the content: option -> value
    versions: dict[str, str]  # library -> version
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    num_files: int
    notes: dict[str, int]  # samples with a note, e.g. padding_removed
    buckets: tuple[BucketLayout, ...]  # as planned, before any sample was found not finite
    checksum: str = ""  # SHA-256 of this document with the field blank


def write_record(store: Path, record: ConversionRecord) -> None:
    """Write ``conversion.json``, whole or not at all."""
    write_file(store / RECORD_NAME, [sealed.seal(record.model_dump_json(indent=2))])


def read_record(store: Path) -> ConversionRecord | None:
    """Read ``conversion.json``; None if preparation never came to its end.

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
        raise StoreError(f"{path}: {fault}. Remove {store} and convert again")
    try:
        return ConversionRecord.model_validate_json(content)
    except ValidationError:
        raise StoreError(f"{path}: not of this version; remove {store} and convert again") from None


def check_settings(store: Path, record: ConversionRecord, settings: dict[str, Any]) -> None:
    """Refuse to go on with a store of another cache or other options.

    Raises:
        StoreError: Naming each field that differs, with both values.
    """
    # Through JSON, so that a tuple equals the list it was written as.
    wanted = json.loads(json.dumps(settings))
    differing = [
        f"{name}: store has {json.dumps(record.settings.get(name))}, now {json.dumps(wanted.get(name))}"
        for name in sorted({*record.settings, *wanted})
        if record.settings.get(name) != wanted.get(name)
    ]
    if differing:
        raise StoreError(
            f"{store}: was begun otherwise ({'; '.join(differing)}). Use the same options and files, or give another "
            "folder"
        )
