import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_store import make_store

from dflash_tools.errors import StoreError
from dflash_tools.extract.estimate import check_space, estimate_buckets, what_fits
from dflash_tools.store import open_store
from dflash_tools.store.arrays import StoreShape, shape_of


@pytest.mark.parametrize("hidden_states_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("last", [False, True])
def test_estimates_are_the_bytes_of_the_files(tmp_path, hidden_states_dtype, last):
    """EX-01: exact without compression."""
    path = make_store(
        tmp_path / "store",
        hidden_states_dtype=hidden_states_dtype,
        last_hidden_state=last,
        shard_bytes=20_000,
        target=False,
    )
    store = open_store(path)
    index = store.index
    buckets = estimate_buckets(
        index["num_tokens"].to_numpy(), index["bucket_id"].to_numpy(), store.manifest.buckets, shape_of(store.manifest)
    )
    for bucket in buckets:
        files = (path / "buckets" / str(bucket.bucket_id)).glob("*/c.*")
        assert bucket.num_bytes == sum(file.stat().st_size for file in files)
    assert sum(bucket.num_bytes for bucket in buckets) == store.manifest.num_bytes


@given(st.integers(1, 10**13), st.integers(0, 10**13), st.sampled_from(["none", "lossless"]))
def test_what_is_offered_fits_and_is_smaller(num_bytes, free, codec):
    shape = StoreShape(num_layers=5, hidden_size=4096, codec=codec)
    for words in what_fits(num_bytes, shape, free):
        assert "fp8" in words or codec == "none"
        assert num_bytes > 0.3 * free or "about" in words


def test_a_store_that_does_not_fit_is_refused_with_numbers_and_a_way_out(tmp_path, monkeypatch):
    shape = StoreShape(num_layers=5, hidden_size=4096)
    monkeypatch.setattr("dflash_tools.extract.estimate.free_bytes", lambda folder: 12 * 10**9)
    check_space(tmp_path, 10 * 10**9, shape)
    with pytest.raises(StoreError, match=r'need about 16 GB and 12 GB are free.*codec = "lossless" \(about 11\.3 GB\)'):
        check_space(tmp_path, 16 * 10**9, shape)
    with pytest.raises(StoreError, match="--limit with at most 12% of the samples"):
        check_space(tmp_path, 100 * 10**9, shape)


def test_bytes_per_token_are_layers_times_hidden_times_two():
    assert StoreShape(num_layers=5, hidden_size=4096).bytes_per_token == 5 * 4096 * 2
    assert np.isclose(StoreShape(num_layers=5, hidden_size=4096, hidden_states_dtype="fp8").bytes_per_token, 21_120)
