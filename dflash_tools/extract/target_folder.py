"""``STORE/target/`` with the identity of the target, so that a store can be finished without loading it again."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dflash_tools.contracts.manifest import TargetIdentity
from dflash_tools.errors import StoreError
from dflash_tools.store.files import make_folder, sync_folder, write_file
from dflash_tools.target.folder import write_target_folder
from dflash_tools.target.load import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER_NAME = "target"
IDENTITY_NAME = "identity.json"


def read_identity(store: Path) -> TargetIdentity | None:
    """The target whose folder is in the store; None if the folder is not whole yet.

    Raises:
        StoreError: If the file is damaged.
    """
    path = store / FOLDER_NAME / IDENTITY_NAME
    try:
        return TargetIdentity.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise StoreError(f"{path}: damaged; remove it and run extract again") from None


def ensure_target_folder(store: Path, target: Target, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write the folder unless it is there; the identity comes last.

    Raises:
        StoreError: If the folder is there and of another target.
    """
    found = read_identity(store)
    if found is not None:
        if found != target.identity:
            raise StoreError(
                f"{store / FOLDER_NAME}: is of {found.model} ({found.architecture}, {found.dtype}), the target here "
                f"is {target.identity.model} ({target.identity.architecture}, {target.identity.dtype}) or one with "
                "other weights; use the same target, or extract into another folder"
            )
        return
    folder = store / FOLDER_NAME
    make_folder(folder)
    write_target_folder(target, tokenizer, folder)
    for path in folder.rglob("*"):
        _sync(path)
    sync_folder(folder)
    write_file(folder / IDENTITY_NAME, [(target.identity.model_dump_json(indent=2) + "\n").encode()])


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
