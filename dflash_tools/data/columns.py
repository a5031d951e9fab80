"""Rows of Parquet and Arrow files, read in bounded batches whatever the size of a row group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_tools.data.files import FileKind
from dflash_tools.data.raw import RawRow, RawRows
from dflash_tools.errors import DataError

BATCH_ROWS = 256


def read_column_rows(path: Path, kind: FileKind, name: str) -> RawRows:
    """Read the rows of a columnar file.

    A columnar file gives every row all columns, and every struct all fields that any row has: null fields are absent
    fields, and are left out on every level.

    Args:
        path: The file.
        kind: PARQUET, ARROW_FILE or ARROW_STREAM.
        name: What to call it in an error.

    Raises:
        DataError: If the file cannot be opened.
    """
    import pyarrow

    number = 0
    batches = _parquet_batches(path) if kind is FileKind.PARQUET else _arrow_batches(path, kind)
    try:
        for batch in batches:
            # A slice at a time: one Arrow batch may hold any number of rows.
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield RawRow(number, drop_nulls(row))
    except (pyarrow.ArrowException, OSError) as error:
        advice = f"{str(error).splitlines()[0]}; write the file again with smaller row groups, or as JSONL"
        if number == 0:
            raise DataError(f"{name}: no row can be read as {kind.value}: {advice}") from None
        yield RawRow(number + 1, None, damage=advice)


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def _arrow_batches(path: Path, kind: FileKind) -> Iterator[Any]:
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as source:
        if kind is FileKind.ARROW_STREAM:
            yield from pyarrow.ipc.open_stream(source)
            return
        reader = pyarrow.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def drop_nulls(value: Any) -> Any:
    """Leave out null fields of objects, on every level; lists keep their nulls."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value
