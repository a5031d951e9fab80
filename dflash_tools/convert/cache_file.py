"""One file of a cache, opened without ever running code that lies in it: safetensors, or torch files of tensors."""

import gzip
import io
import os
import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_tools.errors import DataError

SAFETENSORS = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
PACKED = ".gz"
_ZIP_MAGIC = b"PK\x03\x04"

# Reasons in dropped.parquet.
UNREADABLE = "unreadable"
NOT_ONLY_TENSORS = "not_only_tensors"


class FileFault(Exception):
    """One file cannot become a sample; the others go on."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of a cache: its place in the list, from 1, its name relative to the cache, and its size in bytes."""

    row: int
    name: str
    num_bytes: int


def list_files(source: Path, suffixes: tuple[str, ...]) -> tuple[list[CacheFile], int]:
    """List the files of a cache in the order of their names.

    Args:
        source: Folder of the cache; sub-folders belong to it.
        suffixes: Endings that make a file one of the cache; each also with ``.gz``.

    Returns:
        The files, and how many other files lie there.

    Raises:
        DataError: If there is no such folder or no such file in it.
    """
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; give the folder that holds the cache")
    endings = tuple(ending + packed for ending in suffixes for packed in ("", PACKED))
    found, num_others = [], 0
    for folder, _, names in os.walk(source, followlinks=True):
        for name in names:
            path = Path(folder) / name
            if name.endswith(endings):
                found.append((path.relative_to(source).as_posix(), path.stat().st_size))
            else:
                num_others += 1
    if not found:
        raise DataError(f"{source}: holds no file that ends in {' or '.join(endings)}; give the folder of the cache")
    return [CacheFile(row, *entry) for row, entry in enumerate(sorted(found), start=1)], num_others


def read_tensors(path: Path, *, whole: bool) -> dict[str, Any]:
    """Read a file; nothing in it is executed.

    Args:
        path: A safetensors or torch file, also packed with gzip.
        whole: Read every byte and compare it with the file's own checksums (torch and gzip have them, safetensors has
            none); else map the file, so that only tensors that are looked at are read.

    Returns:
        Tensors and plain values by name.

    Raises:
        FileFault: If the file is truncated, damaged, or asks for anything but tensors and plain values.
        DataError: If the disk refuses to read it.
    """
    kind = path.name.removesuffix(PACKED)
    try:
        if not path.stat().st_size:
            raise FileFault(UNREADABLE, "the file is empty")
        if path.name.endswith(PACKED):
            content = _unpack(path)
        elif whole:
            content = path.read_bytes()
        else:
            return _map(path)
        return _parse_safetensors(content) if kind.endswith(SAFETENSORS) else _parse_torch(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); mend that and run the same command again") from None


def _unpack(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFault(UNREADABLE, f"gzip: {error}") from None


def _map(path: Path) -> dict[str, Any]:
    if not path.name.endswith(SAFETENSORS):
        with path.open("rb") as file:
            _check_magic(file.read(len(_ZIP_MAGIC)))
        return _load_torch(path, mmap=True)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise FileFault(UNREADABLE, str(error)) from None


def _parse_safetensors(content: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(content))
    except SafetensorError as error:
        raise FileFault(UNREADABLE, str(error)) from None


def _parse_torch(content: bytes) -> dict[str, Any]:
    _check_magic(content[: len(_ZIP_MAGIC)])
    try:
        # torch.load does not look at the checksums of the archive.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise FileFault(UNREADABLE, str(error)) from None
    if damaged is not None:
        raise FileFault(UNREADABLE, f"{damaged} in the archive fails its checksum")
    return _load_torch(io.BytesIO(content), mmap=False)


def _load_torch(file: Path | io.BytesIO, *, mmap: bool) -> dict[str, Any]:
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is None:
            raise FileFault(UNREADABLE, _first_line(error)) from None
        raise FileFault(NOT_ONLY_TENSORS, f"asks for {asked.group(1)}, which was not run") from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise FileFault(UNREADABLE, _first_line(error)) from None
    if not isinstance(content, dict):
        raise FileFault(NOT_ONLY_TENSORS, f"holds a {type(content).__name__}, expected a table of tensors")
    return content


def _check_magic(start: bytes) -> None:
    if start != _ZIP_MAGIC:
        raise FileFault(UNREADABLE, "does not start as a file of torch.save does")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
