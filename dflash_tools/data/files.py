"""Which files a source means, and what kind of file each one is, by its first bytes."""

import glob
from enum import Enum
from pathlib import Path

from dflash_tools.errors import ConfigError, DataError

COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".ipc", ".feather")


class FileKind(Enum):
    """What a file holds. Names lie, first bytes do not."""

    JSON = "json"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"
    ARROW_FILE = "arrow file"
    ARROW_STREAM = "arrow stream"


_MAGIC = {
    b"\x1f\x8b": FileKind.GZIP,
    b"\x28\xb5\x2f\xfd": FileKind.ZSTD,
    b"PAR1": FileKind.PARQUET,
    b"ARROW1\0\0": FileKind.ARROW_FILE,
    b"\xff\xff\xff\xff": FileKind.ARROW_STREAM,
}
_REFUSED = {
    b"BZh": "bzip2; unpack it, or pack it again with gzip or zstd",
    b"\xfd7zXZ\0": "xz; unpack it, or pack it again with gzip or zstd",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
    b"SQLite format 3": "an SQLite database; export its rows as JSONL",
    b"version https://git-lfs": "a Git LFS pointer; run git lfs pull",
}


def find_files(path: str, base: Path) -> dict[str, Path]:
    """List the files that a source means.

    A folder means every file below it whose name ends in one of DATA_SUFFIXES, also packed ones; a glob means what it
    matches. Both are read in the order of their paths.

    Args:
        path: File, folder or glob.
        base: Folder that the path is relative to; the working folder is tried next.

    Returns:
        Name -> file; a name starts with ``path`` as given, so it does not depend on where the data lies.

    Raises:
        ConfigError: If nothing is found.
    """
    for root in (base, Path()):
        place = root / path
        if place.is_file():
            return {path: place}
        if place.is_dir():
            return _files_of_folder(path, place)
        if glob.has_magic(path):
            found = _files_of_glob(path, root)
            if found:
                return found
    raise ConfigError(
        f"data source {path}: not found below {base.absolute()} nor below {Path.cwd()}; correct the path in the data "
        "manifest or in data.sources"
    )


def _files_of_folder(path: str, folder: Path) -> dict[str, Path]:
    files = sorted(
        (file for file in folder.rglob("*") if file.is_file() and _is_data_name(file.name)),
        key=lambda file: file.relative_to(folder).parts,
    )
    if not files:
        raise ConfigError(
            f"data source {path}: no file below {folder} ends in {', '.join(DATA_SUFFIXES)} (.gz and .zst may follow); "
            "name the files, or a glob of them"
        )
    return {f"{path.rstrip('/')}/{file.relative_to(folder).as_posix()}": file for file in files}


def _files_of_glob(path: str, root: Path) -> dict[str, Path]:
    anchor = Path(path).anchor
    folder = Path(anchor) if anchor else root
    files = sorted(file for file in folder.glob(path.removeprefix(anchor)) if file.is_file())
    return {(file if anchor else file.relative_to(root)).as_posix(): file for file in files}


def _is_data_name(name: str) -> bool:
    lower = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        lower = lower.removesuffix(suffix)
    return not name.startswith(".") and lower.endswith(DATA_SUFFIXES)


def sniff(path: Path, name: str) -> FileKind:
    """Tell what a file holds by its first bytes.

    Args:
        path: The file.
        name: What to call it in an error.

    Raises:
        DataError: If it is of a kind that is not read here.
    """
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}; check the file and its permissions") from None
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    refuse_foreign(head, name)
    return FileKind.JSON


def refuse_foreign(head: bytes, name: str) -> None:
    """Stop at content that is surely no JSON text.

    Raises:
        DataError: If the first bytes are those of another kind of file.
    """
    for magic, advice in _REFUSED.items():
        if head.startswith(magic):
            raise DataError(f"{name}: is {advice}")
