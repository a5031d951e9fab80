"""``index.parquet``: the table of samples as a Polars frame, one row per sample."""

import io
from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.contracts.fingerprint import fingerprint_of_arrays, fingerprint_of_json
from dflash_tools.contracts.index import INDEX_COLUMNS
from dflash_tools.errors import StoreError
from dflash_tools.store.files import checksum_of_bytes, write_file

INDEX_NAME = "index.parquet"
INDEX_SCHEMA = {name: getattr(pl, dtype)() for name, dtype in INDEX_COLUMNS.items()}


def write_index(store: Path, index: pl.DataFrame) -> None:
    """Write the index; equal frames give equal bytes.

    Raises:
        ValueError: If columns or dtypes are not those of the contract.
    """
    if dict(index.schema) != INDEX_SCHEMA:
        raise ValueError(f"index columns are {dict(index.schema)}, expected {INDEX_SCHEMA}")
    buffer = io.BytesIO()
    index.rechunk().write_parquet(buffer, compression="zstd", compression_level=3, statistics=False)
    write_file(store / INDEX_NAME, [buffer.getvalue()])


def read_index(store: Path, expected: tuple[int, str] | None = None) -> pl.DataFrame:
    """Read the index.

    Args:
        store: The store's folder.
        expected: Size and SHA-256 from the manifest, checked before parsing; None for an unfinished store.

    Raises:
        StoreError: If the file is missing or not the one that was written.
    """
    path = store / INDEX_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{path}: missing; restore it from a copy, or extract again") from None
    return parse_index(content, str(path), expected)


def parse_index(content: bytes, name: str, expected: tuple[int, str] | None) -> pl.DataFrame:
    """Check and read the bytes of an index.

    Raises:
        StoreError: As for ``read_index``.
    """
    if expected is not None and (len(content), checksum_of_bytes(content)) != tuple(expected):
        raise StoreError(
            f"{name}: {len(content)} bytes that are not the {expected[0]} bytes the manifest names: damaged. "
            "Restore it from a copy, or run extract with --repair"
        )
    try:
        index = pl.read_parquet(io.BytesIO(content))
    except pl.exceptions.PolarsError as error:
        raise StoreError(f"{name}: cannot be read as Parquet ({error}); run extract again") from None
    if dict(index.schema) != INDEX_SCHEMA:
        raise StoreError(f"{name}: columns {index.columns}; expected {list(INDEX_SCHEMA)}. Extract again")
    return index


def index_fingerprint(index: pl.DataFrame) -> str:
    """Identity of the index's content, whatever library wrote the file. Returns 64 hex digits."""
    parts = []
    for name, dtype in INDEX_SCHEMA.items():
        column = index[name]
        if dtype == pl.String():
            lengths = column.str.len_bytes().to_numpy()
            text = "".join(column.to_list()).encode()
            parts.append([name, fingerprint_of_arrays(lengths), checksum_of_bytes(text)])
        else:
            parts.append([name, fingerprint_of_arrays(column.to_numpy())])
    return fingerprint_of_json(parts)


def rows_by_shard(index: pl.DataFrame) -> dict[tuple[int, int], tuple[int, int]]:
    """First row and one past the last row of each (bucket_id, shard_id).

    Raises:
        ValueError: If the rows are not ordered by bucket and shard.
    """
    keys = index.select("bucket_id", "shard_id").to_numpy()
    if not len(keys):
        return {}
    firsts = np.flatnonzero(np.any(np.diff(keys, axis=0, prepend=keys[:1] - 1) != 0, axis=1))
    rows = {
        (int(keys[first, 0]), int(keys[first, 1])): (int(first), int(stop))
        for first, stop in zip(firsts, [*firsts[1:], len(keys)], strict=True)
    }
    if len(rows) != len(firsts):
        raise ValueError("index rows must be ordered by bucket, shard and start")
    return rows
