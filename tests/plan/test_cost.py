"""Estimates of arithmetic and memory."""

import numpy as np
from plan.plan_cases import lognormal_mix

from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.cost import BatchWork, DrafterShape, batch_work, count_shapes, estimate_bytes, estimate_flops

SHAPE = DrafterShape(
    hidden_size=192,
    vocab_size=5000,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=512,
    num_target_features=3,
    block_size=8,
)

QWEN3_8B = DrafterShape(
    hidden_size=4096,
    vocab_size=151936,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    num_target_features=5,
    block_size=16,
)


def one_batch(num_tokens, num_anchors, num_pairs=0.0):
    return BatchWork(
        num_tokens=np.array([num_tokens]), num_anchors=np.array([num_anchors]), num_pairs=np.array([num_pairs])
    )


def test_work_is_counted_per_batch():
    plan = build_plan([10, 20, 40], [0, 0, 1], PlanSettings(num_epochs=1))
    work = batch_work(plan, [10, 20, 40], [1, 2, 3], block_size=4)
    assert sorted(work.num_tokens) == [30, 40]
    assert sorted(work.num_anchors) == [3, 3]
    assert sorted(work.num_pairs) == [4 * (5 + 4) + 2 * 4 * (10 + 4), 3 * 4 * (20 + 4)]


def test_slots_cost_far_more_than_context():
    """The mix of the method page: the shortest bucket has seven times the blocks of the longest, and so the cost."""
    lengths, bucket_ids = lognormal_mix()
    plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=1, max_batch_size=4096))
    work = batch_work(plan, lengths, np.minimum(lengths // 2, 512), block_size=16)
    flops, size = estimate_flops(work, QWEN3_8B), estimate_bytes(work, QWEN3_8B)
    short, long = plan.bucket_ids == 0, plan.bucket_ids == 5
    assert flops[short].mean() / flops[long].mean() > 4
    assert size[short].mean() / size[long].mean() > 3


def test_the_arithmetic_is_that_of_the_drafter():
    """Two documents of 400 and 300 tokens, 80 blocks: torch's FlopCounterMode counts the same over all matmuls."""
    assert estimate_flops(one_batch(700, 80), SHAPE)[0] == 5_686_394_880


def test_rounding_shapes_leaves_fewer_of_them():
    lengths, bucket_ids = lognormal_mix()
    plan = build_plan(lengths, bucket_ids, PlanSettings(num_epochs=1))
    work = batch_work(plan, lengths, np.minimum(lengths // 2, 512), block_size=16)
    exact = count_shapes(work)
    rounded = count_shapes(work, token_multiple=2048, anchor_multiple=1024)
    assert (exact.num_batches, exact.added_tokens, exact.added_anchors) == (len(plan), 0, 0)
    assert exact.num_shapes > 0.9 * len(plan)
    assert rounded.num_shapes < 40
    assert 0 < rounded.added_tokens < 0.1
    assert 0 < rounded.added_anchors < 0.3
