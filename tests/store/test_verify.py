"""Verify: every flipped bit, every missing, truncated or unnamed file is found and named; a whole store passes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from make_store import make_store

from dflash_tools.errors import StoreError
from dflash_tools.printing import plain
from dflash_tools.store import open_store
from dflash_tools.store.arrays import shape_of
from dflash_tools.store.verify import verify_store

KINDS = {
    "none": {},
    "lossless": {"codec": "lossless"},
    "fp8": {"hidden_states_dtype": "fp8", "last_hidden_state": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "S"
    options = {"lengths": [5, 40, 17, 33, 9, 30], "shard_bytes": 9000, "target": False}
    make_store(path, finish=False, **options)
    (path / "target").mkdir()
    (path / "target" / "frozen.safetensors").write_bytes(bytes(range(256)) * 20)
    return make_store(path, **options)


def files_of(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


@pytest.fixture
def store(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "S")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_store_passes(tmp_path, kind, deep):
    path = make_store(tmp_path / "S", shard_bytes=9000, target=False, **KINDS[kind])
    assert verify_store(path, deep=deep) == []


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def check_flips(store: Path, per_file: int) -> None:
    generator = np.random.default_rng(0)
    for path in files_of(store):
        name = path.relative_to(store).as_posix()
        num_bits = 8 * path.stat().st_size
        if not num_bits:
            continue
        for bit in {0, num_bits - 1, *generator.integers(0, num_bits, per_file).tolist()}:
            flip(path, bit)
            damage = verify_store(store, deep=True)
            assert name in {item.file for item in damage}, f"{name}, bit {bit}"
            if name.startswith(("buckets", "shards")) and not name.endswith("zarr.json"):
                hurt = next(item for item in damage if item.file == name)
                assert None not in (hurt.bucket_id, hurt.shard_id)
                assert hurt.sample_ids
            flip(path, bit)
    assert verify_store(store, deep=True) == []


def test_a_flipped_bit_in_any_file_is_found_and_named(store):
    check_flips(store, per_file=1)


@pytest.mark.slow
def test_many_flipped_bits_in_every_file_are_found_and_named(store):
    check_flips(store, per_file=150)


@pytest.mark.parametrize("deep", [False, True])
def test_every_missing_file_is_found(store, deep):
    for path in files_of(store):
        content = path.read_bytes()
        path.unlink()
        assert path.relative_to(store).as_posix() in {item.file for item in verify_store(store, deep=deep)}
        path.write_bytes(content)
    assert verify_store(store, deep=deep) == []


@pytest.mark.parametrize("deep", [False, True])
def test_every_truncated_file_is_found(store, deep):
    for path in files_of(store):
        content = path.read_bytes()
        for length in {0, len(content) // 2, max(len(content) - 1, 0)} - {len(content)}:
            path.write_bytes(content[:length])
            assert path.relative_to(store).as_posix() in {item.file for item in verify_store(store, deep=deep)}
        path.write_bytes(content)
    assert verify_store(store, deep=deep) == []


def test_files_that_nothing_names_are_damage(store):
    for name in ("notes.txt", "buckets/0/hidden_states/c.9.0.0", "shards/7-7.json", "target/extra.bin", "x.tmp"):
        (store / name).write_bytes(b"?")
    damage = {item.file: item.problem for item in verify_store(store)}
    assert set(damage) == {
        "notes.txt",
        "buckets/0/hidden_states/c.9.0.0",
        "shards/7-7.json",
        "target/extra.bin",
        "x.tmp",
    }
    assert "named by neither" in damage["notes.txt"]


def test_fast_mode_finds_flips_in_small_files_and_deep_mode_in_all(store):
    flip(store / "index.parquet", 100)
    assert [item.file for item in verify_store(store)] == ["index.parquet"]


def test_only_the_samples_whose_chunks_are_hurt_are_named(store):
    opened = open_store(store)
    place = opened.index.row(0, named=True)
    path = store / f"buckets/{place['bucket_id']}/hidden_states/c.{place['shard_id']}.0.0"
    flip(path, 5 * 8)  # in the first chunk, which belongs to the first row of the shard
    damage = verify_store(store, deep=True)
    assert [item.sample_ids for item in damage] == [(place["sample_id"],)]
    assert place["sample_id"] in str(damage[0])


def test_two_shards_that_changed_places_are_found_without_deep(store):
    first, second = sorted((store / "shards").glob("*.json"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert {item.file for item in verify_store(store)} >= {f"shards/{first.name}", f"shards/{second.name}"}


def test_values_that_contradict_the_index_are_found_though_every_byte_is_as_written(tmp_path):
    from dflash_tools.store.index import write_index
    from dflash_tools.store.writer import StoreWriter

    path = make_store(tmp_path / "S", target=False)
    opened = open_store(path)
    write_index(path, opened.index.with_columns(num_valid_anchors=opened.index["num_valid_anchors"] + 1))
    writer = StoreWriter(path, shape_of(opened.manifest), opened.manifest.buckets)
    writer.finish(opened.manifest)
    assert verify_store(path) == []
    damage = verify_store(path, deep=True)
    assert len(damage) == len(opened)
    assert "anchors" in damage[0].problem


def test_a_file_that_the_disk_cannot_read_is_damage_not_a_crash(store, monkeypatch):
    def fail(path, dtype):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(np, "fromfile", fail)
    damage = verify_store(store, deep=True)
    assert all("cannot be read" in item.problem for item in damage)
    assert {item.file.split("/")[2] for item in damage} == {"hidden_states"}


def test_an_unfinished_store_is_reported_as_such(tmp_path):
    path = make_store(tmp_path / "S", target=False, finish=False)
    damage = verify_store(path, deep=True)
    assert [item.file for item in damage] == ["manifest.json"]
    assert "unfinished" in damage[0].problem


def test_a_folder_that_is_not_there_is_the_users_error(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        verify_store(tmp_path / "nothing")


def test_damage_is_json_able(store):
    flip(store / "buckets/0/input_ids/c.0", 3)
    document = json.loads(json.dumps(plain(verify_store(store, deep=True))))
    assert document[0]["bucket_id"] == 0
    assert document[0]["sample_ids"]
