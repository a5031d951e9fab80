"""``manifest.json``: written last, sealed with its own checksum, read before anything else."""

import json
from pathlib import Path

from pydantic import ValidationError

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.manifest import STORE_FORMAT, STORE_SCHEMA_VERSION, StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.store import sealed
from dflash_tools.store.files import write_file

MANIFEST_NAME = "manifest.json"


def write_manifest(store: Path, manifest: StoreManifest) -> StoreManifest:
    """Seal and write the manifest: from here on the store is complete.

    Returns:
        The manifest with its checksum.
    """
    content = sealed.seal(manifest.model_copy(update={"checksum": ""}).model_dump_json(indent=2))
    write_file(store / MANIFEST_NAME, [content])
    return StoreManifest.model_validate_json(content)


def read_manifest(store: Path) -> StoreManifest:
    """Read and check the manifest of a finished store.

    Raises:
        StoreError: If there is no store, it is unfinished, of another version, or the manifest is damaged.
    """
    path = store / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(_explain_missing(store)) from None
    return parse_manifest(content, str(path))


def check_file(store: Path, manifest: StoreManifest, name: str) -> Path:
    """Check the bytes of a file that the manifest names, before anything is made of them.

    Args:
        store: Folder of the store.
        manifest: Its manifest.
        name: Path below the store, e.g. ``target/frozen.safetensors``.

    Raises:
        StoreError: If the file is missing, of another size or of other bytes.
    """
    path = store / name
    size, checksum = manifest.files[name]
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        problem = "missing, but the manifest names it"
    elif found != size:
        problem = f"{found} bytes, expected {size}"
    elif checksum_of_file(path) != checksum:
        problem = "the bytes are not those that the manifest names"
    else:
        return path
    raise StoreError(f"{path}: {problem}; run extract with --repair, or restore the file")


def parse_manifest(content: bytes, name: str) -> StoreManifest:
    """Check and read the bytes of a manifest.

    Raises:
        StoreError: As for ``read_manifest``.
    """
    fault = sealed.find_fault(content)
    if fault is not None:
        raise StoreError(
            f"{name}: {fault}. Restore the file from a copy, or remove it and run extract again: "
            "it writes the manifest anew from the finished shards"
        )
    document = json.loads(content)
    found = (document.get("format"), document.get("schema_version"))
    if found != (STORE_FORMAT, STORE_SCHEMA_VERSION):
        raise StoreError(
            f"{name}: format {found[0]!r}, schema version {found[1]!r}; this version of dflash-tools reads "
            f"{STORE_FORMAT!r}, version {STORE_SCHEMA_VERSION}. Use the version that wrote the store, or extract again"
        )
    try:
        return StoreManifest.model_validate(document)
    except ValidationError as error:
        raise StoreError(f"{name}: not a manifest of this version: {error}. Extract again") from None


def _explain_missing(store: Path) -> str:
    if not store.exists():
        return f"{store}: no such store; make it with: dflash-tools extract CONFIG --store {store}"
    if not store.is_dir():
        return f"{store}: is a file; expected the folder of a store"
    if (store / "buckets").is_dir():
        return (
            f"{store}: unfinished, {MANIFEST_NAME} is not there; run extract again to go on, "
            "or with --close to finish it over the shards that are there"
        )
    return f"{store}: not a store, {MANIFEST_NAME} is not there; give the folder that extract wrote"
