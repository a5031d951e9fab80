import json

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.contracts.manifest import BucketLayout
from dflash_tools.store.arrays import StoreShape, metadata_files
from dflash_tools.store.shard import ShardEncoder, check_shard, compress, crc32c, decode_index, decompress


def test_the_crc_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283


@settings(deadline=None)
@given(st.integers(1, 3000), st.sampled_from([1, 2]), st.integers(0, 5))
def test_compression_gives_every_bit_back(num_values, typesize, seed):
    data = np.random.default_rng(seed).integers(0, 256, num_values * typesize, dtype=np.uint8)
    out = np.empty_like(data)
    decompress(compress(data, typesize), out)
    assert np.array_equal(out, data)


def test_an_index_knows_which_places_are_empty():
    samples = [np.ones((5, 2), dtype=np.uint16), np.full((3, 2), 2, dtype=np.uint16)]
    content = np.frombuffer(
        b"".join(bytes(b) for b in ShardEncoder(samples, [0, 12], chunk_tokens=4, shard_tokens=16, codec="none")),
        dtype=np.uint8,
    )
    index = decode_index(content[-(4 * 16 + 4) :])
    empty = np.iinfo(np.uint64).max
    assert index.tolist() == [[0, 20], [20, 20], [empty, empty], [40, 20]]
    assert len(content) == 3 * 20 + 4 * 16 + 4


def test_every_byte_of_a_shard_is_covered_by_its_checksum():
    samples = [np.arange(10, dtype=np.uint16).reshape(5, 2), np.ones((3, 2), dtype=np.uint16)]
    encoder = ShardEncoder(samples, [0, 12], chunk_tokens=4, shard_tokens=16, codec="none")
    content = np.frombuffer(b"".join(bytes(b) for b in encoder), dtype=np.uint8)
    checksum, damaged = check_shard(content, 4)
    assert checksum == encoder.checksum()
    assert damaged.tolist() == [False, False, True, False]  # nothing was written to the third place
    for bit in range(8 * len(content)):
        flipped = content.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        found, hurt = check_shard(flipped, 4)
        assert found != checksum or hurt.sum() > 1


def test_chunks_that_changed_places_change_the_checksum():
    """A CRC over data and their own CRCs would not notice: it does not depend on the data."""
    samples = [np.full((4, 2), value, dtype=np.uint16) for value in (1, 2)]
    checksums = set()
    for order in (samples, samples[::-1]):
        encoder = ShardEncoder(order, [0, 4], chunk_tokens=4, shard_tokens=8, codec="none")
        list(encoder)
        checksums.add(encoder.checksum())
    assert len(checksums) == 2


def test_a_damaged_index_is_not_read():
    tail = np.zeros(2 * 16 + 4, dtype=np.uint8)
    assert decode_index(tail) is None


def test_whole_chunks_are_not_copied():
    sample = np.ones((8, 2), dtype=np.uint16)
    buffers = list(ShardEncoder([sample], [0], chunk_tokens=4, shard_tokens=8, codec="none"))
    assert np.shares_memory(buffers[0], sample)


@pytest.mark.parametrize("codec", ["none", "lossless"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_array_metadata_is_what_zarr_itself_would_write(codec, dtype, tmp_path):
    shape = StoreShape(num_layers=2, hidden_size=64, codec=codec, hidden_states_dtype=dtype, last_hidden_state=True)
    bucket = BucketLayout(
        bucket_id=0,
        min_tokens=1,
        max_tokens=9,
        num_samples=1,
        num_tokens=9,
        axis_tokens=32,
        chunk_tokens=8,
        shard_tokens=16,
        num_shards=2,
    )
    for name, content in metadata_files(shape, (bucket,)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    group = zarr.open_group(tmp_path, mode="r")
    for name, array in group["buckets/0"].arrays():
        ours = json.loads((tmp_path / "buckets/0" / name / "zarr.json").read_text())
        theirs = json.loads(json.dumps(array.metadata.to_dict()))
        theirs.pop("storage_transformers", None)
        assert {key: theirs[key] for key in ours} == ours
