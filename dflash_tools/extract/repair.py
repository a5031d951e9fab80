"""Set aside what is damaged, so that the rest of the extraction makes exactly that again."""

from pathlib import Path

from dflash_tools.errors import StoreError
from dflash_tools.extract.record import RECORD_NAME
from dflash_tools.extract.target_folder import FOLDER_NAME, IDENTITY_NAME
from dflash_tools.store.commit import record_name
from dflash_tools.store.damage import Damage
from dflash_tools.store.files import make_folder
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.verify import verify_store


def find_damage(store: Path, *, deep: bool) -> list[Damage]:
    """Look for damage in a finished or unfinished store; a manifest that is not written yet is none."""
    unfinished = not (store / MANIFEST_NAME).exists() and (store / RECORD_NAME).exists()
    return [item for item in verify_store(store, deep=deep) if not (unfinished and item.file == MANIFEST_NAME)]


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

    Returns:
        The folder.
    """
    aside = store.with_name(f"{store.name}.damaged")
    names = {item.file for item in damage} | {MANIFEST_NAME}
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
