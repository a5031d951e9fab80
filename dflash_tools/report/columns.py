"""Columns of a frame as NumPy arrays and single numbers."""

import numpy as np
import polars as pl
from numpy.typing import NDArray


def numbers(frame: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """A numeric column as floats; null becomes NaN. Shape: (num_rows,)."""
    return frame.get_column(column).cast(pl.Float64).fill_null(float("nan")).to_numpy()


def median_of(frame: pl.DataFrame, column: str) -> float:
    """Median of what is known of a column; NaN if nothing is."""
    values = numbers(frame, column)
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def mean_of(frame: pl.DataFrame, column: str) -> float:
    """Mean of what is known of a column; NaN if nothing is."""
    values = numbers(frame, column)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def total_of(frame: pl.DataFrame, column: str) -> int:
    """Sum of a column of counts."""
    return int(frame.get_column(column).sum())


def largest_of(frame: pl.DataFrame, column: str) -> int:
    """Largest entry of a column of counts; 0 without rows."""
    values = numbers(frame, column)
    return int(values.max()) if len(values) else 0
