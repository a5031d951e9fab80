"""What a plan is made from: the indexes of one or more stores, pooled as train pools them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.config import LossSection
from dflash_tools.contracts.index import TRAIN
from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.plan.anchors import anchors_per_sample
from dflash_tools.plan.stores import JoinedColumns, StoreColumns, join_stores
from dflash_tools.report.composition import SampleColumns
from dflash_tools.store.index import INDEX_NAME, read_index
from dflash_tools.store.manifest_file import read_manifest


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One or more stores as one table of rows.

    Attributes:
        columns: What the planner needs of every row.
        num_supervised_tokens: Supervised tokens of every row. Shape: (num_rows,).
        sample_ids: Name of every row.
    """

    columns: JoinedColumns
    num_supervised_tokens: NDArray[np.int64]
    sample_ids: pl.Series

    def samples(self, loss: LossSection) -> SampleColumns:
        """Columns of every row, with the blocks that each training sample gets in an epoch."""
        is_training, valid = self.columns.is_training, self.columns.num_valid_anchors
        num_anchors = np.zeros(len(valid), dtype=np.int64)
        num_anchors[is_training] = anchors_per_sample(valid[is_training], loss.num_anchors, loss.anchor_rule)
        return SampleColumns(
            num_tokens=self.columns.num_tokens,
            bucket_ids=self.columns.bucket_ids,
            num_supervised_tokens=self.num_supervised_tokens,
            num_valid_anchors=valid,
            num_anchors=num_anchors,
        )


def read_store(path: Path) -> tuple[StoreManifest, pl.DataFrame]:
    """Read manifest and index of a finished store; no array is touched.

    Raises:
        StoreError: If the store is missing, unfinished or damaged.
    """
    manifest = read_manifest(path)
    return manifest, read_index(path, manifest.files.get(INDEX_NAME))


def read_pool(paths: Sequence[Path]) -> Pool:
    """Read several stores.

    Raises:
        StoreError: If one of them is missing, unfinished or damaged.
    """
    stores = [read_store(path) for path in paths]
    rows = pl.concat(index.select("sample_id", "num_supervised_tokens") for _, index in stores)
    return Pool(
        columns=join_stores([_columns_of(manifest, index) for manifest, index in stores]),
        num_supervised_tokens=rows.get_column("num_supervised_tokens").to_numpy().astype(np.int64),
        sample_ids=rows.get_column("sample_id"),
    )


def _columns_of(manifest: StoreManifest, index: pl.DataFrame) -> StoreColumns:
    return StoreColumns(
        num_tokens=index.get_column("num_tokens").to_numpy().astype(np.int64),
        bucket_ids=index.get_column("bucket_id").to_numpy(),
        num_valid_anchors=index.get_column("num_valid_anchors").to_numpy().astype(np.int64),
        is_training=index.get_column("split").to_numpy() == TRAIN,
        num_buckets=len(manifest.buckets),
        fingerprint=manifest.fingerprint(),
    )
