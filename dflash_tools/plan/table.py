"""A plan as a table: one row per batch, in memory and in ``plan.parquet``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflash_tools.contracts.plan import PLAN_SCHEMA_VERSION, BatchPlan
from dflash_tools.errors import ResumeError

PLAN_FORMAT = "dflash-tools-plan"
_KEY = "dflash_tools_plan"  # Parquet metadata: everything about a plan that is no column

# What a damaged file gives: the reader's own errors (it may panic), missing columns and keys, broken JSON and offsets.
_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, KeyError, ValueError)


def plan_to_frame(plan: BatchPlan) -> pl.DataFrame:
    """Turn a plan into a frame: epoch, step, bucket_id and the list of sample_rows, one row per batch."""
    columns = {"epoch": plan.epochs, "step": plan.steps, "bucket_id": plan.bucket_ids}
    # Arrow's list layout is the plan's own: values and offsets; the round trip through a group-by costs nothing.
    batch = np.repeat(np.arange(len(plan), dtype=np.uint32), np.diff(plan.offsets))
    lists = pl.DataFrame({"batch": batch, "sample_rows": plan.sample_rows})
    lists = lists.group_by("batch", maintain_order=True).agg("sample_rows")
    return pl.DataFrame(columns).with_columns(lists["sample_rows"])


def save_plan(plan: BatchPlan, path: Path) -> None:
    """Write a plan as compact Parquet, with its settings and fingerprint in the file's metadata."""
    about = {
        "format": PLAN_FORMAT,
        "schema_version": PLAN_SCHEMA_VERSION,
        "settings": plan.settings,
        "store_fingerprint": plan.store_fingerprint,
        "left_out": plan.left_out,
        "fingerprint": plan.fingerprint(),
    }
    plan_to_frame(plan).write_parquet(path, compression="zstd", metadata={_KEY: json.dumps(about)})


def load_plan(path: Path) -> BatchPlan:
    """Read a plan back, to the bit.

    Raises:
        ResumeError: If the file is missing, no plan, of another schema version, or changed since it was written.
    """
    try:
        about = json.loads(pl.read_parquet_metadata(path).get(_KEY, "{}"))
        _check_kind(path, about)
        plan = _plan_of_frame(pl.read_parquet(path, glob=False), about)
        written = about["fingerprint"]
    except FileNotFoundError:
        raise ResumeError(f"{path}: no such plan; start the run again in a new folder") from None
    except _UNREADABLE as error:
        raise ResumeError(f"{path}: not a readable plan ({error}); restore it from a copy of the run") from None
    if plan.fingerprint() != written:
        raise ResumeError(
            f"{path}: plan {plan.fingerprint()[:12]} where {written[:12]} was written; "
            "the file was changed: restore it from a copy of the run"
        )
    return plan


def _check_kind(path: Path, about: dict[str, Any]) -> None:
    if about.get("format") != PLAN_FORMAT:
        raise ResumeError(f"{path}: a Parquet file, but not a plan; give the plan.parquet of a run")
    if about.get("schema_version") != PLAN_SCHEMA_VERSION:
        raise ResumeError(
            f"{path}: plan of schema version {about.get('schema_version')}, this version of dflash-tools reads "
            f"{PLAN_SCHEMA_VERSION}; continue the run with the version that started it"
        )


def _plan_of_frame(frame: pl.DataFrame, about: dict[str, Any]) -> BatchPlan:
    sizes = frame["sample_rows"].list.len().to_numpy()
    return BatchPlan(
        epochs=frame["epoch"].to_numpy().copy(),
        steps=frame["step"].to_numpy().copy(),
        bucket_ids=frame["bucket_id"].to_numpy().copy(),
        offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        sample_rows=frame["sample_rows"].explode().to_numpy().copy(),
        settings=about["settings"],
        store_fingerprint=about["store_fingerprint"],
        left_out=about["left_out"],
    )
