"""What a report is made of: a few sentences, figures, tables and charts. How they look is decided elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

ChartKind = Literal["bars", "stack", "line", "points", "heatmap", "ranges"]
MAX_SENTENCES = 7


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows a person can read; column names carry the unit and so decide the format.

    Attributes:
        name: File name without ending, unique in a report.
        title: Caption.
        frame: The rows.
        note: One sentence on how to read it.
        shown: Whether terminal, HTML and Markdown show it; every table is written as Parquet.
    """

    name: str
    title: str
    frame: pl.DataFrame
    note: str = ""
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of a frame.

    Attributes:
        name: Unique in a report.
        title: What is drawn.
        description: What a reader who cannot see it needs to know: axes and the main figure.
        kind: ``bars`` grouped by color, ``stack`` of shares, ``line``, ``points``, ``heatmap`` of x and y with color as
            value, ``ranges`` from column ``low`` to ``high`` with a mark at y.
        frame: The rows drawn.
        x: Column of the horizontal axis.
        y: Column of the vertical axis.
        color: Column that tells series apart (heatmap: the value); "" for none.
        titles: Column -> axis or legend title.
        log_y: Draw the vertical axis in logarithms.
    """

    name: str
    title: str
    description: str
    kind: ChartKind
    frame: pl.DataFrame
    x: str
    y: str
    color: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    log_y: bool = False

    def title_of(self, column: str) -> str:
        """Axis or legend title of a column."""
        return self.titles.get(column, column.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, a sentence or two, and what belongs under it."""

    title: str
    text: str = ""
    parts: tuple[Table | Chart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report, ready to be printed or written.

    Attributes:
        kind: ``store``, ``plan``, ``run`` or ``compare``.
        title: Heading.
        subject: What is reported on, e.g. the path.
        figures: Name -> number; the head of the report and the top level of its JSON.
        diagnosis: At most seven sentences: what is unusual, by how much, compared with what, which setting changes it.
        notes: What the report had to leave out, and why.
        sections: The body.
    """

    kind: Literal["store", "plan", "run", "compare"]
    title: str
    subject: str
    figures: Mapping[str, Any]
    diagnosis: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        if len(self.diagnosis) > MAX_SENTENCES:
            raise ValueError(f"{len(self.diagnosis)} sentences of diagnosis; at most {MAX_SENTENCES} are read")
        names = [part.name for section in self.sections for part in section.parts]
        if len(names) != len(set(names)):
            raise ValueError(f"names of tables and charts repeat: {sorted(names)}")

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every table, in order."""
        return tuple(part for section in self.sections for part in section.parts if isinstance(part, Table))

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Every chart, in order."""
        return tuple(part for section in self.sections for part in section.parts if isinstance(part, Chart))

    def table(self, name: str) -> pl.DataFrame:
        """The frame of one table.

        Raises:
            KeyError: If there is no such table.
        """
        return {table.name: table.frame for table in self.tables}[name]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form: figures at the top level, the shown tables as lists of rows, and the diagnosis."""
        return {
            "kind": self.kind,
            "subject": self.subject,
            **self.figures,
            "diagnosis": list(self.diagnosis),
            "notes": list(self.notes),
            "tables": {table.name: table.frame.to_dicts() for table in self.tables if table.shown},
        }


def share_of(part: float, whole: float) -> float:
    """Ratio, or NaN where there is nothing to share."""
    return part / whole if whole else float("nan")


def keep(*parts: Table | Chart | None) -> tuple[Table | Chart, ...]:
    """Drop the parts that have no rows to show."""
    return tuple(part for part in parts if part is not None and len(part.frame))


def single_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are one value each, the head of a report."""
    return {
        name: value
        for name, value in figures.items()
        if not isinstance(value, Mapping) and (isinstance(value, str) or not isinstance(value, Sequence))
    }
