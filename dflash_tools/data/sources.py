"""The raw rows of one source, whatever it is made of."""

from collections.abc import Iterator
from itertools import islice

from dflash_tools.data.columns import read_column_rows
from dflash_tools.data.files import FileKind, sniff
from dflash_tools.data.hub import read_hub_rows
from dflash_tools.data.json_rows import read_json_rows
from dflash_tools.data.manifest import HUB_PREFIX, PYTHON_REFERENCE, ResolvedSource
from dflash_tools.data.raw import RawRow, RawRows


def read_source(source: ResolvedSource) -> Iterator[tuple[str, RawRow]]:
    """Read the rows of a source, each with the name of its file.

    Raises:
        DataError: If a file is missing, unreadable, or of a kind that is not read here.
    """
    return islice(_read_all(source), source.limit)


def _read_all(source: ResolvedSource) -> Iterator[tuple[str, RawRow]]:
    if source.name == PYTHON_REFERENCE:
        yield from ((source.name, row) for row in _python_reference_rows())
    elif source.name.startswith(HUB_PREFIX):
        yield from ((source.name, row) for row in read_hub_rows(source.name))
    for name, path in zip(source.file_names, source.paths, strict=True):
        kind = sniff(path, name)
        if kind in (FileKind.PARQUET, FileKind.ARROW_FILE, FileKind.ARROW_STREAM):
            rows = read_column_rows(path, kind, name)
        else:
            rows = read_json_rows(path, kind, name)
        yield from ((name, row) for row in rows)


def _python_reference_rows() -> RawRows:
    """Rows of the language reference that comes with Python, by topic."""
    from pydoc_data.topics import topics

    for number, topic in enumerate(sorted(topics), start=1):
        yield RawRow(number, {"text": topics[topic]}, f"topic {topic}")
