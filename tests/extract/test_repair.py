import shutil

import pytest

from dflash_tools.errors import StoreError
from dflash_tools.extract.states import load_target


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture
def damaged(extraction, finished):
    """Copy a finished store to be damaged."""
    shutil.copytree(finished.store, extraction.store)
    return extraction


@pytest.mark.parametrize(
    "names",
    [
        ["hidden_states"],
        ["shards"],
        ["input_ids", "index.parquet"],
        ["manifest.json", "extraction.json"],
        ["dropped.parquet", "loss_mask"],
        ["target/frozen.safetensors", "buckets/0/hidden_states/zarr.json"],
    ],
    ids=" and ".join,
)
def test_repair_makes_exactly_what_is_damaged_again(damaged, finished, read_all, monkeypatch, names):
    """ST-05, ST-14."""
    for name in names:
        path = damaged.store / name
        if name == "shards":
            path = sorted(path.rglob("*.json"))[0]
        elif not path.is_file():
            path = sorted(damaged.store.glob(f"buckets/1/{name}/c.*"))[0]
        flip(path)
    if names != ["hidden_states"]:  # only a deep look hashes states
        with pytest.raises(StoreError, match="--repair"):
            damaged.run()
    loads = []
    monkeypatch.setattr(
        "dflash_tools.extract.states.load_target", lambda section: loads.append(section) or load_target(section)
    )
    damaged.run(repair=True)
    assert read_all(damaged.store) == read_all(finished.store)
    assert (damaged.folder / "store.damaged").is_dir()
    assert len(loads) <= 1


def test_a_missing_shard_file_is_made_again(damaged, finished, read_all):
    sorted(damaged.store.glob("buckets/1/hidden_states/c.*"))[0].unlink()
    damaged.run(repair=True)
    assert read_all(damaged.store) == read_all(finished.store)


def test_a_foreign_file_is_set_aside(damaged, finished, read_all):
    (damaged.store / "buckets" / "stray.bin").write_bytes(b"?")
    damaged.run(repair=True)
    assert read_all(damaged.store) == read_all(finished.store)
    assert (damaged.folder / "store.damaged" / "buckets" / "stray.bin").is_file()


def test_a_whole_store_needs_no_repair(damaged, finished, read_all):
    damaged.run(repair=True)
    assert read_all(damaged.store) == read_all(finished.store)
    assert not (damaged.folder / "store.damaged").exists()


def test_tokens_cannot_be_made_again_from_other_data(damaged):
    flip(sorted(damaged.store.glob("buckets/1/input_ids/c.*"))[0])
    flip(damaged.store / "manifest.json")
    (damaged.folder / "chats.jsonl").write_text('{"text": "something else altogether"}\n')
    with pytest.raises(StoreError, match="another configuration"):
        damaged.run(repair=True)
