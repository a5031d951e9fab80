import pytest
from make_store import make_store

from dflash_tools.store import open_store
from dflash_tools.store.arrays import shape_of
from dflash_tools.store.sizes import bytes_per_token, estimate_size


def files_in(path):
    return [p for p in path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    "options", [{}, {"hidden_states_dtype": "fp8"}, {"last_hidden_state": True}, {"hidden_size": 100}]
)
def test_the_estimate_without_compression_is_exact(tmp_path, options):
    path = make_store(tmp_path / "S", shard_bytes=9000, target=False, **options)
    store = open_store(path)
    index = store.index
    estimate = estimate_size(
        index["num_tokens"].to_numpy(), index["bucket_id"].to_numpy(), store.manifest.buckets, shape_of(store.manifest)
    )
    assert estimate.num_bytes == store.manifest.num_bytes == sum(estimate.bytes_by_bucket)
    others = {"index.parquet", "dropped.parquet", "extraction.json", "manifest.json"}
    assert estimate.num_files == len([p for p in files_in(path) if p.name not in others])


def test_a_lossless_store_is_estimated_by_the_measured_ratio(tmp_path):
    path = make_store(tmp_path / "S", codec="lossless", target=False)
    store = open_store(path)
    index = store.index
    estimate = estimate_size(
        index["num_tokens"].to_numpy(), index["bucket_id"].to_numpy(), store.manifest.buckets, shape_of(store.manifest)
    )
    assert estimate.num_bytes == pytest.approx(store.manifest.num_bytes, rel=0.2)  # random states, small chunks


def test_other_dtypes_and_codecs_can_be_compared_before_choosing():
    plain = bytes_per_token(5, 4096, "bfloat16", "none", False)
    assert plain == 40_960
    assert bytes_per_token(5, 4096, "bfloat16", "lossless", False) == pytest.approx(plain / 1.4)
    assert bytes_per_token(5, 4096, "fp8", "none", False) == 5 * (4096 + 128)
    assert bytes_per_token(5, 4096, "bfloat16", "none", True) == plain + 8192
