from itertools import pairwise

import numpy as np
import pytest
from plan.plan_cases import lognormal_mix

from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.anchors import anchors_per_sample
from dflash_tools.plan.composition import binding_limits, effective_weights, repeated_pairs, slot_efficiency


def pairs_of(plan, epoch):
    batches = np.flatnonzero(plan.epochs == epoch)
    return {(a, b) for batch in batches for a in plan.rows(batch) for b in plan.rows(batch) if a < b}


def test_repeated_pairs_are_those_of_both_epochs():
    lengths, bucket_ids = lognormal_mix(300)
    plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=3))
    pairs = [pairs_of(plan, epoch) for epoch in range(3)]
    expected = [len(a & b) / len(a) for a, b in pairwise(pairs)]
    assert repeated_pairs(plan) == pytest.approx(expected)


def test_at_most_a_fifth_of_the_pairs_repeat_on_the_mix():
    """Composition is drawn anew each epoch, not only the order."""
    plan = build_plan(*lognormal_mix(), PlanSettings(num_epochs=4))
    assert repeated_pairs(plan).max() <= 0.2


@pytest.mark.parametrize("count", [200, 600, 2000])
def test_small_stores_redraw_their_batches_too(count):
    plan = build_plan(*lognormal_mix(count), PlanSettings(num_epochs=4))
    assert repeated_pairs(plan).mean() <= 0.3


def test_batches_of_one_have_no_pairs():
    plan = build_plan([9, 9], [0, 0], PlanSettings(num_epochs=2, max_batch_size=1))
    assert np.isnan(repeated_pairs(plan)).all()


def test_capped_samples_count_less_and_proportional_anchors_even_it():
    lengths, bucket_ids = lognormal_mix()
    supervised = lengths // 2
    fixed = effective_weights(bucket_ids, anchors_per_sample(supervised - 1, 256), supervised)
    even = effective_weights(bucket_ids, anchors_per_sample(supervised - 1, 256, "proportional"), supervised)
    assert fixed.values[0] > 1.5
    assert fixed.values[-1] < 0.5
    assert np.allclose(even.values, 1, atol=0.05)


def test_slot_efficiency_is_exact_for_one_turn():
    """One run of 10 supervised tokens, blocks of 4: 9 anchors with 1, 2, 3, 3 ... filled slots of 3."""
    filled = [min(d, 3) for d in range(1, 10)]
    assert slot_efficiency([9], [9], [10], 4) == pytest.approx([sum(filled) / 27])


def test_short_turns_fill_few_slots():
    """Five runs of 2 supervised tokens: every block fills one slot of 15."""
    assert slot_efficiency([5], [5], [10], 16) == pytest.approx([1 / 15])
    assert np.isnan(slot_efficiency([0], [0], [0], 16)).all()


def test_the_limit_that_binds_is_named():
    """PL-19: batch size 64 asked for, 22 given, because the token budget ends the batch; and the reverse."""
    lengths = np.full(1000, 200)
    (limit,) = binding_limits(build_plan(lengths, np.zeros(1000), PlanSettings(token_budget=4400)), lengths)
    assert limit.by_tokens / limit.num_batches > 0.8
    (limit,) = binding_limits(build_plan(lengths, np.zeros(1000), PlanSettings(max_batch_size=10)), lengths)
    assert limit.by_batch_size / limit.num_batches > 0.8
    assert limit.mean_batch_size == pytest.approx(10, rel=0.05)
    anchors = np.full(1000, 50)
    plan = build_plan(lengths, np.zeros(1000), PlanSettings(anchor_budget=500), anchors)
    (limit,) = binding_limits(plan, lengths, anchors)
    assert limit.by_anchors / limit.num_batches > 0.8
    assert limit.by_tokens + limit.by_anchors + limit.by_batch_size + limit.by_window == limit.num_batches
