import pytest

from dflash_tools.errors import StoreError
from dflash_tools.store import sealed
from dflash_tools.store.commit import (
    CommitRecord,
    StoredSample,
    committed_shards,
    read_record,
    write_record,
)

RECORD = CommitRecord(
    bucket_id=2,
    shard_id=13,
    chunk_tokens=8,
    shard_tokens=64,
    samples=(StoredSample(sample_id="a" * 32, start=832, num_tokens=5),),
    files={"buckets/2/input_ids/c.13": (260, "0" * 64)},
    split_forward_ids=(1,),
)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "shards").mkdir()
    return tmp_path


def test_a_record_is_read_as_it_was_written(store):
    write_record(store, RECORD)
    assert read_record(store, 2, 13).model_copy(update={"checksum": ""}) == RECORD
    assert committed_shards(store) == {(2, 13)}
    assert read_record(store, 2, 14) is None


def test_a_half_written_record_does_not_count(store):
    (store / "shards" / "2-13.json.tmp").write_bytes(b"{")
    assert committed_shards(store) == set()


def test_a_record_under_another_name_is_refused(store):
    write_record(store, RECORD)
    (store / "shards" / "2-13.json").rename(store / "shards" / "2-14.json")
    with pytest.raises(StoreError, match="holds the record of bucket 2, shard 13"):
        read_record(store, 2, 14)


def test_a_damaged_record_names_the_repair(store):
    write_record(store, RECORD)
    path = store / "shards" / "2-13.json"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StoreError, match=r"truncated or damaged.*--repair"):
        read_record(store, 2, 13)


def test_a_record_of_another_version_is_refused(store):
    text = RECORD.model_dump_json(indent=2).replace('"bucket_id"', '"bucket"')
    (store / "shards" / "2-13.json").write_bytes(sealed.seal(text))
    with pytest.raises(StoreError, match="not a commit record of this version"):
        read_record(store, 2, 13)
