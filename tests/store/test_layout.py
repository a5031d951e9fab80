import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.store.layout import (
    MIB,
    build_layout,
    choose_chunk_tokens,
    choose_shard_bytes,
    shard_write_order,
)

EDGES = (16, 64, 200)


@st.composite
def layouts(draw):
    lengths = np.array(draw(st.lists(st.integers(1, 200), max_size=80)), dtype=np.int32)
    options = {
        "bytes_per_token": draw(st.sampled_from([6, 192, 5000, 600_000])),
        "codec": draw(st.sampled_from(["none", "lossless"])),
        "forward_token_budget": draw(st.sampled_from([1, 64, 500])),
        "shard_bytes": draw(st.sampled_from([1, 20_000, 1 << 20])),
        "seed": draw(st.integers(0, 3)),
    }
    bucket_ids = np.searchsorted(EDGES, lengths).astype(np.int32)
    return lengths, bucket_ids, options, build_layout(lengths, bucket_ids, EDGES, **options)


@given(layouts())
def test_samples_start_on_chunks_stay_in_their_shard_and_never_overlap(case):
    lengths, bucket_ids, _, layout = case
    for bucket in layout.buckets:
        rows = np.flatnonzero(bucket_ids == bucket.bucket_id)
        rows = rows[np.argsort(layout.starts[rows])]
        starts, stops = layout.starts[rows], layout.starts[rows] + lengths[rows]
        assert np.all(starts % bucket.chunk_tokens == 0)
        assert np.all(starts[1:] >= stops[:-1])
        assert np.all(starts // bucket.shard_tokens == layout.shard_ids[rows])
        assert np.all((stops - 1) // bucket.shard_tokens == layout.shard_ids[rows])
        assert np.all(stops <= bucket.axis_tokens)
        assert set(layout.shard_ids[rows]) == set(range(bucket.num_shards))


@given(layouts())
def test_a_shard_holds_a_forward_batch_and_the_longest_sample(case):
    lengths, bucket_ids, options, layout = case
    for bucket in layout.buckets:
        held = lengths[bucket_ids == bucket.bucket_id]
        assert bucket.shard_tokens % bucket.chunk_tokens == 0
        assert bucket.shard_tokens >= min(options["forward_token_budget"], held.sum())
        assert bucket.shard_tokens >= held.max(initial=0)


@given(layouts())
def test_forward_batches_lie_in_one_shard_and_keep_the_budget(case):
    lengths, bucket_ids, options, layout = case
    keys = np.stack([bucket_ids, layout.shard_ids, layout.forward_ids], axis=1)
    for key in np.unique(keys, axis=0):
        batch = lengths[np.all(keys == key, axis=1)]
        assert len(batch) == 1 or len(batch) * batch.max() <= options["forward_token_budget"]


@given(layouts())
def test_row_order_is_by_bucket_shard_and_start(case):
    _, bucket_ids, _, layout = case
    rows = layout.row_order
    assert sorted(rows) == list(range(len(bucket_ids)))
    keys = list(zip(bucket_ids[rows], layout.shard_ids[rows], layout.starts[rows], strict=True))
    assert keys == sorted(keys)


@given(layouts())
def test_equal_input_gives_an_equal_layout(case):
    lengths, bucket_ids, options, layout = case
    again = build_layout(lengths, bucket_ids, EDGES, **options)
    assert again.buckets == layout.buckets
    assert np.array_equal(again.starts, layout.starts)
    assert np.array_equal(again.forward_ids, layout.forward_ids)


def test_an_empty_store_has_empty_buckets():
    none = np.zeros(0, dtype=np.int32)
    layout = build_layout(none, none, EDGES, bytes_per_token=192, codec="none", forward_token_budget=64)
    assert [bucket.num_shards for bucket in layout.buckets] == [0, 0, 0]


def test_a_sample_outside_its_bucket_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 17 tokens, its bucket 0 holds 1 to 16"):
        build_layout(
            np.array([16, 17]), np.array([0, 0]), EDGES, bytes_per_token=192, codec="none", forward_token_budget=64
        )


def test_a_row_that_makes_chunks_of_2_gib_is_refused():
    """ST-08."""
    with pytest.raises(ValueError, match="2 GiB"):
        build_layout(
            np.array([4]), np.array([0]), EDGES, bytes_per_token=1 << 28, codec="none", forward_token_budget=64
        )


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_chunks_of_wide_and_long_samples_keep_to_their_bytes(codec):
    """ST-08: 64 thousand tokens of 5 layers x 8,192."""
    bytes_per_token = 5 * 8192 * 2
    chunk_tokens = choose_chunk_tokens(np.array([65_536]), bytes_per_token, codec)
    assert chunk_tokens * bytes_per_token <= {"none": 4 * MIB, "lossless": 2 * MIB}[codec]
    assert 2 * chunk_tokens * bytes_per_token > {"none": 4 * MIB, "lossless": 2 * MIB}[codec]


def test_chunks_of_short_samples_waste_at_most_three_percent_or_are_smallest():
    lengths = np.random.default_rng(0).integers(20, 3000, 5000)
    chunk_tokens = choose_chunk_tokens(lengths, 40_960, "none")
    padding = (-lengths % chunk_tokens).sum() / lengths.sum()
    assert padding <= 0.03
    assert choose_chunk_tokens(np.full(100, 9), 40_960, "none") == 8


def test_shards_grow_with_the_store_to_1_gib():
    assert choose_shard_bytes(10**9) == 96 * MIB
    large = 200_000 * 2000 * 40_960  # 16.4 TB
    assert 1e9 <= choose_shard_bytes(large) <= 1024 * MIB
    assert large / choose_shard_bytes(large) < 20_000


def test_a_hundred_thousand_samples_make_files_by_bytes_not_by_samples():
    """ST-16."""
    lengths = np.random.default_rng(0).integers(8, 17, 100_000).astype(np.int32)
    bucket_ids = np.searchsorted(EDGES, lengths).astype(np.int32)
    layout = build_layout(lengths, bucket_ids, EDGES, bytes_per_token=40_960, codec="none", forward_token_budget=16384)
    total = sum(bucket.num_shards for bucket in layout.buckets)
    assert total <= 1.1 * (-(-lengths // 8) * 8).sum() * 40_960 / (96 * MIB) + 1


def test_shards_of_a_bucket_are_alike_in_length_inside_and_random_between():
    lengths = np.random.default_rng(0).integers(65, 201, 4000).astype(np.int32)
    layout = build_layout(
        lengths,
        np.full(4000, 2, dtype=np.int32),
        EDGES,
        bytes_per_token=192,
        codec="none",
        forward_token_budget=1000,
        shard_bytes=192 * 2000,
    )
    keys = np.stack([layout.shard_ids, layout.forward_ids], axis=1)
    padded = sum(
        lengths[rows].max() * len(rows)
        for key in np.unique(keys, axis=0)
        for rows in [np.flatnonzero(np.all(keys == key, axis=1))]
    )
    assert lengths.sum() / padded > 0.97


def test_the_shard_with_the_longest_sample_is_written_first_and_each_once():
    bucket_ids = np.array([0, 0, 1, 1, 1], dtype=np.int32)
    shard_ids = np.array([0, 1, 0, 1, 1], dtype=np.int32)
    order = shard_write_order(bucket_ids, shard_ids, np.array([3, 4, 9, 30, 8], dtype=np.int32))
    assert order[0] == (1, 1)
    assert sorted(order) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_many_samples_are_laid_out_fast():
    lengths = np.random.default_rng(0).integers(1, 201, 200_000).astype(np.int32)
    bucket_ids = np.searchsorted(EDGES, lengths).astype(np.int32)
    layout = build_layout(lengths, bucket_ids, EDGES, bytes_per_token=40_960, codec="none", forward_token_budget=16384)
    assert len(layout.row_order) == 200_000
