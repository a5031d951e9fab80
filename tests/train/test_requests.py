import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.plan.stores import StoreColumns, join_stores
from dflash_tools.train.batch import EVALUATION_EPOCH
from dflash_tools.train.requests import batch_costs, evaluation_requests, plan_request, share_step
from dflash_tools.train.stores import Samples


def make_samples(lengths, bucket_ids, held_out):
    lengths = np.array(lengths, dtype=np.int64)
    columns = StoreColumns(
        num_tokens=lengths,
        bucket_ids=np.array(bucket_ids, dtype=np.int32),
        num_valid_anchors=np.maximum(lengths - 1, 0),
        is_training=~np.array(held_out, dtype=bool),
        fingerprint="s",
        num_buckets=3,
    )
    return Samples(
        stores=(),
        first_rows=np.zeros(1, dtype=np.int64),
        columns=join_stores([columns]),
        num_supervised_tokens=lengths,
        sample_ids=np.array([f"{i:032x}" for i in range(len(lengths))], dtype=object),
        validation_rows=np.flatnonzero(held_out),
    )


rows = st.lists(st.tuples(st.integers(2, 90), st.integers(0, 2), st.booleans()), min_size=1, max_size=40)


@settings(deadline=None)
@given(rows, st.integers(1, 5), st.integers(90, 300), st.one_of(st.none(), st.integers(8, 40)))
def test_every_held_out_sample_is_measured_once_within_the_budgets(rows, max_batch_size, token_budget, anchor_budget):
    samples = make_samples(*zip(*rows, strict=True))
    config = TrainConfig.model_validate(
        {
            "plan": {
                "max_batch_size": max_batch_size,
                "token_budget": token_budget,
                "anchor_budget": anchor_budget,
            },
            "evaluation": {"num_anchors": 8},
        }
    )
    requests = evaluation_requests(samples, config)
    assert sorted(row for request in requests for row in request.rows) == samples.validation_rows.tolist()
    for position, request in enumerate(requests):
        assert request.batch == position
        assert request.epoch == EVALUATION_EPOCH
        assert set(samples.columns.bucket_ids[request.rows]) == {request.bucket_id}
        assert len(request.rows) <= max_batch_size
        assert len(request.rows) * request.num_tokens.max() <= token_budget
        assert anchor_budget is None or request.num_anchors.sum() <= anchor_budget


def test_the_number_of_held_out_samples_is_bounded_by_their_ids_not_by_their_lengths():
    samples = make_samples([5, 6, 7, 8], [0, 0, 0, 0], [True, False, True, True])
    samples.sample_ids[:] = [f"{9 - i:032x}" for i in range(4)]
    config = TrainConfig.model_validate({"evaluation": {"max_samples": 2}})
    assert sorted(row for request in evaluation_requests(samples, config) for row in request.rows) == [2, 3]


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 5))
def test_the_ranks_of_any_world_share_each_step_without_gap_or_overlap(batches_per_step, world_size):
    steps = np.repeat(np.arange(len(batches_per_step)), batches_per_step)
    num_batches = len(steps)
    samples = make_samples(range(2, 2 + num_batches), [0] * num_batches, [False] * num_batches)
    plan = BatchPlan(
        epochs=np.zeros(num_batches, dtype=np.int32),
        steps=steps.astype(np.int64),
        bucket_ids=np.zeros(num_batches, dtype=np.int32),
        offsets=np.arange(num_batches + 1),
        sample_rows=np.arange(num_batches),
        settings={},
    )
    anchors = np.arange(num_batches)
    costs = batch_costs(plan, samples, anchors, block_size=4)
    assert costs.tolist() == [4 * i + i + 2 for i in range(num_batches)]
    for step in range(plan.num_steps):
        shares = share_step(plan, costs, step, world_size)
        assert len(shares) == world_size
        assert sorted(batch for share in shares for batch in share) == list(plan.batches_of_step(step))
        assert all(share == sorted(share) for share in shares)
    assert plan_request(plan, num_batches - 1, samples, anchors).num_anchors.tolist() == [num_batches - 1]
