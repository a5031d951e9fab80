"""Writing: byte-identical, whole or not there, and resumable after any stop."""

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from make_store import make_store

from dflash_tools.errors import StoreError
from dflash_tools.store import open_store
from dflash_tools.store.arrays import shape_of
from dflash_tools.store.index import write_index
from dflash_tools.store.writer import StoreWriter

OPTIONS = {"shard_bytes": 9000, "target": False}


def digest(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def writer_of(path: Path) -> StoreWriter:
    store = open_store(path)
    return StoreWriter(path, shape_of(store.manifest), store.manifest.buckets)


@pytest.mark.parametrize(
    "options", [{}, {"codec": "lossless"}, {"hidden_states_dtype": "fp8"}, {"last_hidden_state": True}]
)
def test_equal_input_gives_equal_files(tmp_path, options):
    first = make_store(tmp_path / "a", **OPTIONS, **options)
    second = make_store(tmp_path / "b", **OPTIONS, **options)
    assert digest(first) == digest(second)


def test_a_made_store_with_its_target_is_deterministic_too(tmp_path):
    assert digest(make_store(tmp_path / "a")) == digest(make_store(tmp_path / "b"))
    assert (tmp_path / "a/target/frozen.safetensors").is_file()


def test_bytes_written_are_the_bytes_kept(tmp_path):
    """ST-07: whole shards only, nothing is read back and written again."""
    path = make_store(tmp_path / "S", lengths=[64] * 40, **OPTIONS)
    store = open_store(path)
    useful = store.manifest.num_tokens * (3 * 32 * 2 + 4 + 1)
    assert store.manifest.num_bytes <= 1.10 * useful  # rows of 192 bytes: the sums of 8-row chunks still show


def test_a_record_names_every_file_of_its_shard(tmp_path):
    path = make_store(tmp_path / "S", hidden_states_dtype="fp8", last_hidden_state=True, target=False)
    writer = writer_of(path)
    for key in writer.shards():
        record = writer.write_shard(*key, *states_of(writer, *key))
        assert sorted(name.split("/")[2] for name in record.files) == [
            "hidden_scales",
            "hidden_states",
            "input_ids",
            "last_hidden_state",
            "loss_mask",
        ]


def states_of(writer, bucket_id, shard_id):
    store = open_store(writer.store)
    samples = store.read(list(writer.rows_of(bucket_id, shard_id)))
    return [s.hidden_states for s in samples], [s.last_hidden_state for s in samples]


def test_token_ids_and_masks_can_be_read_back_before_the_states_exist(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    writer = writer_of(path)
    store = open_store(path)
    for key in writer.shards():
        for row, (ids, mask) in zip(writer.rows_of(*key), writer.read_tokens(*key), strict=True):
            expected = store.read_tokens(row)
            assert np.array_equal(ids, expected[0])
            assert np.array_equal(mask, expected[1])


def test_damaged_token_ids_are_not_fed_to_a_target(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    file = path / "buckets/0/input_ids/c.0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="fails its checksum"):
        writer_of(path).read_tokens(0, 0)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0])
def test_infinite_and_nan_states_are_refused_with_the_sample_named(tmp_path, value):
    path = make_store(tmp_path / "S", **OPTIONS)
    writer = writer_of(path)
    states, _ = states_of(writer, 1, 0)
    states[-1][-1, -1, -1] = value
    name = writer.samples_of(1, 0)["sample_id"][-1]
    with pytest.raises(
        StoreError, match=f"sample {name}: hidden_states holds infinite or NaN values in captured layer 3 of 3"
    ):
        writer.write_shard(1, 0, states)


@pytest.mark.parametrize("options", [{"last_hidden_state": True}, {"hidden_states_dtype": "fp8"}])
def test_no_kind_of_state_may_be_infinite(tmp_path, options):
    path = make_store(tmp_path / "S", **OPTIONS, **options)
    writer = writer_of(path)
    states, last = states_of(writer, 0, 0)
    hurt = last if "last_hidden_state" in options else states
    hurt[1][0] = 0x7F80
    before = digest(path)
    with pytest.raises(StoreError, match=writer.samples_of(0, 0)["sample_id"][1]):
        writer.write_shard(0, 0, states, last)
    assert digest(path) == before  # and no temp file


def test_states_of_another_shape_or_length_are_refused(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    writer = writer_of(path)
    states, _ = states_of(writer, 1, 0)
    with pytest.raises(ValueError, match="expected uint16 rows of shape"):
        writer.write_shard(1, 0, [s[:, :2] for s in states])
    with pytest.raises(ValueError, match="lengths"):
        writer.write_shard(1, 0, [s[:-1] for s in states])


def test_what_is_not_committed_is_deleted_and_the_rest_stays(tmp_path):
    """ST-04."""
    path = make_store(tmp_path / "S", **OPTIONS)
    before = digest(path)
    writer = writer_of(path)
    (path / "shards/1-1.json").unlink()
    (path / "buckets/0/hidden_states/c.0.0.0.tmp").write_bytes(b"half")
    (path / "manifest.json.tmp").write_bytes(b"{")
    removed = writer.clean_uncommitted()
    assert removed == [
        "buckets/0/hidden_states/c.0.0.0.tmp",
        "buckets/1/hidden_states/c.1.0.0",
        "buckets/1/input_ids/c.1",
        "buckets/1/loss_mask/c.1",
        "manifest.json.tmp",
    ]
    assert set(digest(path)) == set(before) - set(removed) - {"shards/1-1.json"}


def test_a_store_with_missing_shards_cannot_be_finished(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    writer = writer_of(path)
    (path / "shards/1-1.json").unlink()
    with pytest.raises(StoreError, match=r"1 of \d+ shards are not written, the first is bucket 1, shard 1"):
        writer.finish(open_store(path).manifest)


def test_a_store_can_be_closed_over_the_shards_that_are_there(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    manifest = open_store(path).manifest
    (path / "shards/1-0.json").unlink()
    (path / "manifest.json").unlink()
    index = open_index(path)
    kept = index.filter(~((index["bucket_id"] == 1) & (index["shard_id"] == 0)))
    write_index(path, kept)
    StoreWriter(path, shape_of(manifest), manifest.buckets).finish(manifest)
    store = open_store(path)
    assert len(store.read(range(len(store)))) == len(kept) < len(index)


def open_index(path):
    from dflash_tools.store.index import read_index

    return read_index(path)


def test_an_index_in_another_order_is_refused(tmp_path):
    path = make_store(tmp_path / "S", **OPTIONS)
    store = open_store(path)
    write_index(path, store.index[::-1].sample(fraction=1.0, shuffle=True, seed=1))
    with pytest.raises(ValueError, match="ordered by bucket, shard and start"):
        StoreWriter(path, shape_of(store.manifest), store.manifest.buckets)


def test_threads_write_different_shards_of_a_bucket_side_by_side(tmp_path):
    """ST-02: one shard is one writer's, so nothing is read, changed and written back."""
    path = make_store(tmp_path / "S", lengths=[30] * 40, **OPTIONS)
    before = digest(path)
    writer = writer_of(path)
    assert len(writer.shards()) >= 4
    states = {key: states_of(writer, *key)[0] for key in writer.shards()}
    for file in (path / "shards").iterdir():
        file.unlink()
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda key: writer.write_shard(*key, states[key]), writer.shards()))
    assert digest(path) == before


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from make_store import make_store
calls, last = [0], int(sys.argv[2])
def fsync(descriptor):
    calls[0] += 1
    if calls[0] == last:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
make_store(Path(sys.argv[1]), shard_bytes=9000, target=False)
print(calls[0])
"""


def run(path: Path, kill_at: int) -> subprocess.CompletedProcess:
    tests = str(Path(__file__).resolve().parents[1])
    return subprocess.run([sys.executable, "-c", KILLED, path, str(kill_at), tests], capture_output=True, text=True)


def check_kills(tmp_path, num_points):
    """Kill at points spread over the whole run, resume, and kill once more early in the resumed run."""
    done = run(tmp_path / "whole", 0)
    whole = digest(tmp_path / "whole")
    for number, kill_at in enumerate(np.linspace(1, int(done.stdout), num_points).astype(int).tolist()):
        path = tmp_path / f"killed-{number}"
        assert run(path, kill_at).returncode == -9
        if number % 3 == 0:
            run(path, 5)
        make_store(path, **OPTIONS)
        assert digest(path) == whole, f"killed at fsync {kill_at}"


def test_kills_in_mid_write_leave_a_store_that_ends_up_byte_identical(tmp_path):
    """ST-04: a kill falls between a temp file and its fsync, its rename or its commit record."""
    check_kills(tmp_path, 3)


@pytest.mark.slow
def test_fifty_kills_leave_a_store_that_ends_up_byte_identical(tmp_path):
    check_kills(tmp_path, 50)
