"""Reading: both paths give the bytes that were written, and anything missing is an error, never zeros."""

import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_store import LENGTHS, make_states, make_store, sample_id

from dflash_tools.errors import StoreError
from dflash_tools.store import direct, open_store
from dflash_tools.store.shard import MISSING, crc_bytes, decode_index

KINDS = {
    "none": {},
    "lossless": {"codec": "lossless"},
    "fp8": {"hidden_states_dtype": "fp8"},
    "fp8 lossless": {"hidden_states_dtype": "fp8", "codec": "lossless"},
    "last": {"last_hidden_state": True},
}


@pytest.fixture(scope="module", params=KINDS)
def store_path(request, tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "S", shard_bytes=9000, target=False, **KINDS[request.param])


def written_states(store):
    positions = {sample_id(i): i for i in range(len(LENGTHS))}
    return [make_states(i, LENGTHS[i], 3, 32) for i in (positions[name] for name in store.index["sample_id"])]


@pytest.mark.parametrize("reader", ["direct", "zarr"])
def test_what_was_written_is_read(store_path, reader):
    store = open_store(store_path, reader=reader)
    for sample, states in zip(store.read(range(len(store))), written_states(store), strict=True):
        if store.manifest.hidden_states_dtype == "bfloat16":
            assert np.array_equal(sample.hidden_states, states)
        assert sample.hidden_states.shape == states.shape
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_mask.sum() == len(states) - len(states) // 3
        assert (sample.last_hidden_state is None) == (store.manifest.last_hidden_state is None)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    codec=st.sampled_from(["none", "lossless"]),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
    last=st.booleans(),
    shard_bytes=st.sampled_from([1, 7000, None]),
    hidden_size=st.sampled_from([8, 64, 72]),
    num_layers=st.integers(1, 3),
)
def test_the_direct_path_and_zarr_give_the_same_bytes(
    tmp_path_factory, lengths, codec, dtype, last, shard_bytes, hidden_size, num_layers
):
    path = make_store(
        tmp_path_factory.mktemp("random") / "S",
        lengths,
        codec=codec,
        hidden_states_dtype=dtype,
        last_hidden_state=last,
        shard_bytes=shard_bytes,
        hidden_size=hidden_size,
        num_layers=num_layers,
        target=False,
    )
    first, second = open_store(path), open_store(path, reader="zarr")
    rows = range(len(lengths))
    for a, b in zip(first.read(rows), second.read(rows), strict=True):
        for name in ("hidden_states", "input_ids", "loss_mask"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        assert (a.last_hidden_state is None) == (b.last_hidden_state is None)
        if a.last_hidden_state is not None:
            assert np.array_equal(a.last_hidden_state, b.last_hidden_state)


def test_plain_zarr_opens_the_store_and_finds_the_dtype(store_path):
    """ST-01, ST-17: stock library, warnings are errors."""
    group = zarr.open_group(store_path, mode="r")
    store = open_store(store_path)
    assert group.attrs["format"] == "dflash-tools-store"
    for row, states in enumerate(written_states(store)):
        place = store.index.row(row, named=True)
        rows = slice(place["start"], place["start"] + place["num_tokens"])
        bucket = group[f"buckets/{place['bucket_id']}"]
        if store.manifest.hidden_states_dtype == "bfloat16":
            assert bucket["hidden_states"].attrs["logical_dtype"] == "bfloat16"
            assert np.array_equal(bucket["hidden_states"][rows], states)
        assert np.array_equal(bucket["input_ids"][rows], store.read_tokens(row)[0])


def test_a_buffer_is_filled_in_place(store_path):
    store = open_store(store_path)
    batch = np.full((2, 70, 3, 32), 7, dtype=np.uint16)
    length = store.index["num_tokens"][3]
    store.read_into(3, batch[1, :length])
    assert np.array_equal(batch[1, :length], store.read([3])[0].hidden_states)
    assert np.all(batch[0] == 7)
    assert np.all(batch[1, length:] == 7)


def test_a_buffer_that_does_not_fit_is_refused(store_path):
    store = open_store(store_path)
    with pytest.raises(ValueError, match="needs a C-contiguous uint16 buffer"):
        store.read_into(0, np.empty((1, 3, 32), dtype=np.uint16))


@pytest.mark.parametrize("row", [-1, len(LENGTHS)])
def test_a_row_outside_the_index_is_refused(store_path, row):
    with pytest.raises(IndexError, match="is not in the index"):
        open_store(store_path).read([row])


def test_opening_looks_at_no_array(store_path, monkeypatch):
    """Lengths come from the index; the cost does not depend on the shards."""
    monkeypatch.setattr(direct, "map_file", lambda *_: pytest.fail("a shard was opened"))
    assert open_store(store_path).index["num_tokens"].sum() == sum(LENGTHS)


def test_opening_and_reading_do_not_need_zarr_or_torch(fresh):
    code = (
        "import sys; from dflash_tools.store import open_store; "
        "open_store(sys.argv[1]).read([0]); "
        "print(sorted({'zarr', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, fresh], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_share_a_store_and_its_bounded_files(store_path, monkeypatch):
    monkeypatch.setattr(direct, "MAX_OPEN_FILES", 2)
    store = open_store(store_path)
    expected = open_store(store_path).read(range(len(store)))
    failures = []

    def work(seed):
        for row in np.random.default_rng(seed).permutation(len(store)):
            if not np.array_equal(store.read([int(row)])[0].hidden_states, expected[row].hidden_states):
                failures.append(row)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store._reader._open) <= 2


def test_a_forked_child_reads_though_another_thread_held_the_lock(store_path):
    """ST-09: no deadlock in a loader's worker."""
    store = open_store(store_path)
    expected = store.read([1])[0].hidden_states
    with store._reader._lock:  # as if a thread of the parent were inside
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            same = np.array_equal(store.read([1])[0].hidden_states, expected)
            os._exit(0 if same and len(store.read(range(len(store)))) == len(store) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_store_can_be_sent_to_a_spawned_worker(store_path):
    store = pickle.loads(pickle.dumps(open_store(store_path)))
    assert len(store.read([0])) == 1


@pytest.fixture
def fresh(tmp_path):
    return make_store(tmp_path / "S", shard_bytes=9000, target=False)


def read_all(path, reader):
    store = open_store(path, reader=reader)
    return store.read(range(len(store)))


@pytest.mark.parametrize("reader", ["direct", "zarr"])
@pytest.mark.parametrize("name", ["hidden_states/c.1.0.0", "input_ids/c.1", "loss_mask/c.1"])
def test_a_missing_shard_is_an_error_that_names_the_place_and_never_zeros(fresh, reader, name):
    (fresh / "buckets/1" / name).unlink()
    with pytest.raises(StoreError, match=rf"{fresh}: bucket 1, shard 1, sample [0-9a-f]{{32}} .*is missing.*verify"):
        read_all(fresh, reader)


@pytest.mark.parametrize("reader", ["direct", "zarr"])
def test_a_shard_without_commit_record_does_not_count(fresh, reader):
    (fresh / "shards/1-0.json").unlink()
    with pytest.raises(StoreError, match=r"bucket 1, shard 0, .*commit record shards/1-0.json is missing"):
        read_all(fresh, reader)


@pytest.mark.parametrize("reader", ["direct", "zarr"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_truncated_shard_is_an_error(fresh, reader, keep):
    """ST-05."""
    path = fresh / "buckets/0/hidden_states/c.0.0.0"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(StoreError, match=r"bucket 0, shard 0, .* bytes, not"):
        read_all(fresh, reader)


@pytest.mark.parametrize("reader", ["direct", "zarr"])
@pytest.mark.parametrize("name", ["hidden_states/c.0.0.0", "input_ids/c.0"])
@pytest.mark.parametrize("position", [0, -1])
def test_a_flipped_bit_is_an_error(fresh, reader, name, position):
    path = fresh / "buckets/0" / name
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"bucket 0, shard 0, sample"):
        read_all(fresh, reader)


def test_a_flipped_bit_in_compressed_data_is_found_before_decoding(tmp_path):
    path = make_store(tmp_path / "S", codec="lossless", target=False)
    shard = path / "buckets/0/hidden_states/c.0.0.0"
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreError, match="fails its checksum"):
        read_all(path, "direct")


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_the_index_is_followed_wherever_chunks_lie(tmp_path, codec):
    """Another writer may order the chunks of a shard as it likes."""
    path = make_store(tmp_path / "S", codec=codec, target=False)
    expected = read_all(path, "direct")
    bucket = open_store(path).manifest.buckets[1]
    num_chunks = bucket.shard_tokens // bucket.chunk_tokens
    file = path / "buckets/1/hidden_states/c.0.0.0"
    content = np.fromfile(file, dtype=np.uint8)
    index = decode_index(content[-(16 * num_chunks + 4) :]).copy()
    pieces, offset = [], 0
    for chunk in np.random.default_rng(0).permutation(num_chunks):
        start, size = (int(value) for value in index[chunk])
        if start == int(MISSING):
            continue
        pieces.append(content[start : start + size].tobytes())
        index[chunk, 0] = offset
        offset += size
    table = index.astype("<u8").tobytes()
    file.write_bytes(b"".join(pieces) + table + crc_bytes(table))
    for reader in ("direct", "zarr"):
        for found, sample in zip(read_all(path, reader), expected, strict=True):
            assert np.array_equal(found.hidden_states, sample.hidden_states)


@pytest.mark.parametrize("reader", ["direct", "zarr"])
def test_a_chunk_that_was_never_written_is_an_error(fresh, reader):
    bucket = open_store(fresh).manifest.buckets[1]
    num_chunks = bucket.shard_tokens // bucket.chunk_tokens
    file = fresh / "buckets/1/hidden_states/c.0.0.0"
    content = file.read_bytes()
    index = np.frombuffer(content[-(16 * num_chunks + 4) : -4], dtype="<u8").reshape(-1, 2).copy()
    index[1] = MISSING
    table = index.tobytes()
    file.write_bytes(content[: -len(table) - 4] + table + crc_bytes(table))
    with pytest.raises(StoreError, match=r"bucket 1, shard 0, .*chunk 1 was never written"):
        read_all(fresh, reader)


def test_a_chunk_is_checked_once_per_process(fresh, monkeypatch):
    store = open_store(fresh)
    store.read(range(len(store)))
    monkeypatch.setattr(direct, "extend_crc", lambda *_: pytest.fail("checked again"))
    store.read(range(len(store)))


def test_an_unfinished_store_says_what_to_do(tmp_path):
    path = make_store(tmp_path / "S", target=False, finish=False)
    with pytest.raises(StoreError, match=r"unfinished.*extract again.*--close"):
        open_store(path)


def test_a_folder_that_is_no_store_says_so(tmp_path):
    with pytest.raises(StoreError, match="not a store"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="no such store"):
        open_store(tmp_path / "nothing")


def test_a_damaged_index_is_refused_before_it_is_parsed(fresh):
    """Most one-bit flips in a Parquet file read as some other table."""
    content = bytearray((fresh / "index.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (fresh / "index.parquet").write_bytes(content)
    with pytest.raises(StoreError, match=r"index.parquet.*damaged"):
        open_store(fresh)


def test_a_store_of_a_newer_version_is_refused(fresh):
    from dflash_tools.store import sealed

    text = (fresh / "manifest.json").read_text()
    checksum = open_store(fresh).manifest.checksum
    newer = text.replace('"schema_version": 1', '"schema_version": 2').replace(checksum, "")
    (fresh / "manifest.json").write_bytes(sealed.seal(newer))
    with pytest.raises(StoreError, match="schema version 2"):
        open_store(fresh)
