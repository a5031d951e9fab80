"""The packed strategy: rows of several lengths, filled to the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import EDGES, length_lists, lognormal_mix, ready_made_lengths

from dflash_tools.contracts.plan import PACKED_BUCKET_ID
from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.buckets import assign_buckets
from dflash_tools.plan.statistics import batch_lengths


@given(
    length_lists(),
    st.integers(400, 3000),
    st.none() | st.integers(20, 200),
    st.integers(1, 6),
    st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_every_law_of_a_packed_plan_holds(case, token_budget, anchor_budget, sort_window, seed):
    lengths, edges = case
    anchors = np.minimum(lengths // 3, 20)
    options = PlanSettings(
        strategy="packed",
        token_budget=token_budget,
        anchor_budget=anchor_budget,
        max_batch_size=1,
        sort_window=sort_window,
        num_epochs=2,
        seed=seed,
    )
    plan = build_plan(lengths, assign_buckets(lengths, edges), options, anchors)
    assert set(plan.bucket_ids) == {PACKED_BUCKET_ID}
    for batch in range(len(plan)):
        assert lengths[plan.rows(batch)].sum() <= token_budget
        assert anchor_budget is None or anchors[plan.rows(batch)].sum() <= anchor_budget
    for epoch in (0, 1):
        batches = np.flatnonzero(plan.epochs == epoch)
        rows = plan.sample_rows[plan.offsets[batches[0]] : plan.offsets[batches[-1] + 1]]
        assert sorted(rows) == list(range(len(lengths)))


def packed(lengths, **options):
    return build_plan(lengths, np.zeros(len(lengths)), PlanSettings(strategy="packed", num_epochs=1, **options))


def test_rows_are_nearly_full():
    lengths, _ = lognormal_mix()
    figures = batch_lengths(packed(lengths), lengths)
    assert figures.num_tokens.sum() / figures.num_padded_tokens.sum() >= 0.99


def test_every_batch_mixes_lengths():
    """Best-fit would pair long samples with long ones; here nearly every row holds short and long ones."""
    lengths, bucket_ids = lognormal_mix(20_000)
    plan = packed(lengths)
    num_buckets = np.array([len(set(bucket_ids[plan.rows(batch)])) for batch in range(len(plan))])
    assert np.mean(num_buckets >= 3) > 0.95
    means = np.array([lengths[plan.rows(batch)].mean() for batch in range(len(plan))])
    assert means.std() / means.mean() < 0.25


def test_anchors_fill_the_rows_where_they_are_scarcer():
    lengths, _ = lognormal_mix()
    anchors = np.minimum(lengths // 2, 512)
    options = PlanSettings(strategy="packed", num_epochs=1, anchor_budget=2048)
    plan = build_plan(lengths, np.zeros(len(lengths)), options, anchors)
    assert anchors.sum() / (2048 * len(plan)) > 0.95


def test_samples_beyond_a_budget_go_alone():
    lengths = np.array([100] * 30 + [250, 300])
    plan = packed(lengths, token_budget=200, too_long="alone")
    assert sorted(plan.sample_rows) == list(range(32))
    assert all(lengths[plan.rows(b)].sum() <= 200 or len(plan.rows(b)) == 1 for b in range(len(plan)))
    figures = batch_lengths(plan, lengths)
    assert sorted(figures.num_padded_tokens)[-2:] == [250, 300]


@pytest.mark.parametrize("name", ready_made_lengths())
def test_ready_made_distributions_pack(name):
    lengths = ready_made_lengths()[name]
    plan = build_plan(lengths, assign_buckets(lengths, EDGES), PlanSettings(strategy="packed", num_epochs=1))
    assert sorted(plan.sample_rows) == list(range(len(lengths)))
