"""Raw rows: what the file readers hand to the workers, before anything is understood."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RawRow:
    """One input row.

    Attributes:
        source_row: Line number in a file of lines, else the position in the source; both from 1.
        content: JSON bytes, an object that a columnar reader built, or None where the file is damaged.
        place: Where the row starts if ``source_row`` does not say it, e.g. ``line 4``.
        damage: What is wrong with the file here; the row is then only a place holder for what was lost.
    """

    source_row: int
    content: bytes | dict[str, Any] | None
    place: str = ""
    damage: str = ""


RawRows = Iterator[RawRow]
