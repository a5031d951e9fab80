"""From the index columns of one or more stores to the plan of a run: train and report make the same one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tools.config import LossSection, PlanSettings
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan.anchors import anchors_per_sample
from dflash_tools.plan.buckets import assign_buckets, choose_edges
from dflash_tools.plan.planner import build_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreColumns:
    """Index columns of one store that planning needs. All shapes: (num_rows,).

    Attributes:
        num_tokens: Length of every row. Unit: tokens.
        bucket_ids: Bucket of every row.
        num_valid_anchors: Valid anchors of every row.
        is_training: True for the training split.
        num_buckets: Buckets in the store's manifest.
        fingerprint: Identity of the store.
    """

    num_tokens: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    num_valid_anchors: NDArray[np.int64]
    is_training: NDArray[np.bool_]
    num_buckets: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedColumns:
    """Columns of all rows that a plan may name: the rows of the stores, one store after the other.

    Attributes:
        num_tokens: Length of every row. Unit: tokens.
        bucket_ids: Bucket of every row, in buckets that all stores share.
        num_valid_anchors: Valid anchors of every row.
        is_training: True for the training split.
        store_ids: Position of the row's store.
        edges: Longest length of each bucket, ascending; None for one store, which keeps its own buckets.
        fingerprint: Identity of the store, or of the sequence of stores.
    """

    num_tokens: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    num_valid_anchors: NDArray[np.int64]
    is_training: NDArray[np.bool_]
    store_ids: NDArray[np.int32]
    edges: NDArray[np.int64] | None
    fingerprint: str


def join_stores(stores: Sequence[StoreColumns]) -> JoinedColumns:
    """Lay the rows of several stores end to end; row r of store s becomes r + the rows of the stores before it.

    Several stores were cut at different edges, so their rows get buckets of equal token mass over all of them, as many
    as the store with the most has.
    """
    num_tokens = np.concatenate([store.num_tokens for store in stores]).astype(np.int64)
    edges = None
    if len(stores) == 1:
        bucket_ids = stores[0].bucket_ids.astype(np.int32)
    else:
        edges = choose_edges(num_tokens, max(store.num_buckets for store in stores))
        bucket_ids = assign_buckets(num_tokens, edges)
    fingerprints = [store.fingerprint for store in stores]
    return JoinedColumns(
        num_tokens=num_tokens,
        bucket_ids=bucket_ids,
        num_valid_anchors=np.concatenate([store.num_valid_anchors for store in stores]).astype(np.int64),
        is_training=np.concatenate([store.is_training for store in stores]),
        store_ids=np.repeat(np.arange(len(stores), dtype=np.int32), [len(store.num_tokens) for store in stores]),
        edges=edges,
        fingerprint=fingerprints[0] if len(stores) == 1 else fingerprint_of_json(fingerprints),
    )


def plan_stores(columns: JoinedColumns, settings: PlanSettings, loss: LossSection) -> BatchPlan:
    """Plan a run over the training rows of all stores; ``sample_rows`` count over the joined rows.

    Raises:
        ConfigError: As ``build_plan``.
    """
    rows = np.flatnonzero(columns.is_training)
    return build_plan(
        columns.num_tokens[rows],
        columns.bucket_ids[rows],
        settings,
        anchors_per_sample(columns.num_valid_anchors[rows], loss.num_anchors, loss.anchor_rule),
        rows=rows,
        store_ids=columns.store_ids[rows],
        store_fingerprint=columns.fingerprint,
    )
