"""Parquet files that are whole or not there, and equal for equal content."""

import io
from pathlib import Path

import polars as pl

from dflash_tools.store.files import write_file


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a frame as Parquet through a temp file."""
    buffer = io.BytesIO()
    table.rechunk().write_parquet(buffer, compression="zstd", compression_level=3, statistics=False)
    write_file(path, [buffer.getvalue()])
