"""Making a damaged store unfinished again, so that extraction makes exactly the damaged shards anew."""

from collections.abc import Sequence
from pathlib import Path

from dflash_tools.store import commit
from dflash_tools.store.arrays import StoreShape, shard_arrays
from dflash_tools.store.damage import Damage
from dflash_tools.store.files import make_folder, sync_folder
from dflash_tools.store.manifest_file import MANIFEST_NAME


def set_aside(store: Path, damage: Sequence[Damage], shape: StoreShape) -> Path:
    """Move damaged files, whole shards and the manifest into a folder beside the store.

    The manifest goes first: whatever happens in between, the store counts as unfinished and can be gone on with.

    Args:
        store: The store's folder.
        damage: What ``verify_store`` found.
        shape: Says which files a shard has.

    Returns:
        The folder that the files went to: the store's name with ``.set-aside`` and a number.
    """
    folder = _new_folder(store)
    names = [MANIFEST_NAME]
    for item in damage:
        if item.bucket_id is not None and item.shard_id is not None:
            # The record goes before the files, so that a shard is never committed without them.
            names.append(commit.record_name(item.bucket_id, item.shard_id))
            names += [spec.file_name(item.bucket_id, item.shard_id) for spec in shard_arrays(shape)]
        else:
            names.append(item.file)
    for name in dict.fromkeys(names):
        source, destination = store / name, folder / name
        if source.is_file():
            make_folder(destination.parent)
            source.rename(destination)
            sync_folder(source.parent)
    return folder


def _new_folder(store: Path) -> Path:
    number = 1
    while True:
        folder = store.with_name(f"{store.name}.set-aside-{number}")
        if not folder.exists():
            make_folder(folder)
            return folder
        number += 1
