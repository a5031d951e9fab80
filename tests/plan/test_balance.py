"""Batches of a bucket may change places, so that steps cost the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import lognormal_mix

from dflash_tools.plan.balance import balance_steps


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=80), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_every_batch_keeps_its_bucket(case, batches_per_step):
    places = np.array([bucket for bucket, _ in case])
    costs = np.array([cost for _, cost in case])
    order = np.arange(len(case))
    balanced = balance_steps(order, places, costs, batches_per_step)
    assert sorted(balanced) == list(order)
    assert np.array_equal(places[balanced], places)


def test_a_cheap_batch_goes_where_a_costly_one_is():
    places, costs = np.array([0, 1, 0, 1]), np.array([9, 9, 1, 1])
    balanced = balance_steps(np.arange(4), places, costs, 2)
    assert costs[balanced].reshape(2, 2).sum(axis=1).tolist() == [10, 10]


def test_steps_cost_about_the_same():
    from dflash_tools.plan import PlanSettings, build_plan
    from dflash_tools.plan.planner import balance_steps as used

    assert used is balance_steps
    lengths, bucket_ids = lognormal_mix(20_000)
    anchors = np.minimum(lengths // 2, 512)

    def spread(strategy):
        plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=1, strategy=strategy), anchors)
        costs = np.bincount(plan.steps, np.add.reduceat(anchors[plan.sample_rows], plan.offsets[:-1]))[:-1]
        return costs.std() / costs.mean()

    assert spread("interleave") < 0.07
    assert spread("interleave") < spread("shuffle") / 3
