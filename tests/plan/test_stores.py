import numpy as np
import pytest

from dflash_tools.config import LossSection, PlanSettings
from dflash_tools.plan.stores import StoreColumns, join_stores, plan_stores


def make_store_columns(lengths, fingerprint, bucket_ids=None):
    lengths = np.asarray(lengths)
    return StoreColumns(
        num_tokens=lengths,
        bucket_ids=np.zeros(len(lengths), dtype=np.int32) if bucket_ids is None else np.asarray(bucket_ids),
        num_valid_anchors=lengths // 2,
        is_training=np.arange(len(lengths)) % 5 != 0,
        num_buckets=1 if bucket_ids is None else int(max(bucket_ids)) + 1,
        fingerprint=fingerprint,
    )


def test_one_store_keeps_its_buckets():
    columns = join_stores([make_store_columns([5, 6, 7, 8], "a", [1, 1, 0, 0])])
    assert columns.bucket_ids.tolist() == [1, 1, 0, 0]
    assert (columns.fingerprint, columns.edges) == ("a", None)


def test_several_stores_share_buckets_and_lie_end_to_end():
    stores = [make_store_columns(range(1, 40), "a", np.arange(39) // 20), make_store_columns(range(100, 130), "b")]
    columns = join_stores(stores)
    assert columns.num_tokens.tolist() == [*range(1, 40), *range(100, 130)]
    assert columns.store_ids.tolist() == [0] * 39 + [1] * 30
    assert len(columns.edges) == 2
    assert columns.fingerprint not in ("a", "b")
    assert columns.fingerprint != join_stores(stores[::-1]).fingerprint


def test_only_training_rows_are_planned():
    columns = join_stores([make_store_columns(range(1, 40), "a"), make_store_columns(range(100, 130), "b")])
    plan = plan_stores(columns, PlanSettings(num_epochs=1), LossSection())
    assert sorted(plan.sample_rows) == np.flatnonzero(columns.is_training).tolist()
    assert plan.store_fingerprint == columns.fingerprint


def test_the_anchor_budget_holds_over_all_stores():
    columns = join_stores([make_store_columns(range(10, 40), "a"), make_store_columns(range(30, 60), "b")])
    options = PlanSettings(num_epochs=1, anchor_budget=40)
    plan = plan_stores(columns, options, LossSection(num_anchors=12))
    anchors = np.minimum(columns.num_valid_anchors, 12)
    assert all(anchors[plan.rows(batch)].sum() <= 40 for batch in range(len(plan)))
    assert pytest.approx(1.0) == len(set(plan.sample_rows)) / columns.is_training.sum()
