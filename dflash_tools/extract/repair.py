"""Set aside what is damaged, so that the rest of the extraction makes exactly that again."""

from pathlib import Path

from dflash_tools.errors import StoreError
from dflash_tools.extract.ingest import DROPPED_NAME
from dflash_tools.extract.record import RECORD_NAME, read_record
from dflash_tools.extract.target_folder import FOLDER_NAME, IDENTITY_NAME
from dflash_tools.store.commit import record_name
from dflash_tools.store.damage import Damage
from dflash_tools.store.files import make_folder
from dflash_tools.store.index import INDEX_NAME, index_fingerprint, read_index
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.verify import verify_store


def find_damage(store: Path, *, deep: bool) -> list[Damage]:
    """Look for damage in a finished or unfinished store; a manifest that is not written yet is none."""
    damage = verify_store(store, deep=deep)
    if (store / MANIFEST_NAME).exists():
        manifest_hurt = any(item.file == MANIFEST_NAME for item in damage)
        return damage + (_beside_manifest(store) if manifest_hurt else [])
    return [item for item in damage if item.file != MANIFEST_NAME] + _beside_manifest(store)


def _beside_manifest(store: Path) -> list[Damage]:
    """Check what only a manifest would vouch for: the record and the index it names."""
    try:
        record = read_record(store)
    except StoreError as error:
        return [Damage(file=RECORD_NAME, problem=str(error))]
    # While a store is being closed, its index may still be the larger one.
    if record is None or record.closed or not (store / INDEX_NAME).is_file():
        return []
    try:
        found = index_fingerprint(read_index(store))
    except StoreError as error:
        return [Damage(file=INDEX_NAME, problem=str(error))]
    whole = found == record.index_fingerprint
    return [] if whole else [Damage(file=INDEX_NAME, problem=f"is not the index that {RECORD_NAME} names")]


def refuse_damage(store: Path, damage: list[Damage]) -> None:
    """Stop at a damaged store.

    Raises:
        StoreError: If there is any damage; the first is named.
    """
    if damage:
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise StoreError(f"{store}: damaged: {damage[0]}{more}. Run extract with --repair to make it again")


def set_aside(store: Path, damage: list[Damage]) -> Path:
    """Move damaged files, and what vouches for them, into a folder beside the store.

    The commit record of a hurt shard goes too, so the shard counts as missing, and the manifest, so the store does.
    What a damaged manifest can no longer vouch for is made again: the target folder and the table of dropped rows.

    Returns:
        The folder.
    """
    aside = store.with_name(f"{store.name}.damaged")
    names = {item.file for item in damage} | {MANIFEST_NAME}
    if any(item.file == MANIFEST_NAME for item in damage):
        names |= {f"{FOLDER_NAME}/{IDENTITY_NAME}", DROPPED_NAME}
    for item in damage:
        if item.bucket_id is not None and item.shard_id is not None:
            names.add(record_name(item.bucket_id, item.shard_id))
        if item.file.startswith(f"{FOLDER_NAME}/"):
            names.add(f"{FOLDER_NAME}/{IDENTITY_NAME}")
    for name in sorted(names):
        if (store / name).is_file():
            make_folder((aside / name).parent)
            (store / name).rename(aside / name)
    return aside
