import polars as pl
import pytest

from dflash_tools.errors import Interrupted, StoreError
from dflash_tools.extract import close as close_module
from dflash_tools.progress import Progress
from dflash_tools.store import open_store
from dflash_tools.store.verify import verify_store


@pytest.fixture
def half_done(extraction, monkeypatch):
    """Stop an extraction after some shards."""
    advance, batches = Progress.advance, 0

    def interrupted(progress, num_tokens):
        nonlocal batches
        batches += 1
        if batches == 11:
            raise Interrupted(15)
        advance(progress, num_tokens)

    monkeypatch.setattr(Progress, "advance", interrupted)
    with pytest.raises(Interrupted):
        extraction.run()
    monkeypatch.setattr(Progress, "advance", advance)
    return extraction


def test_closing_makes_a_whole_store_of_the_shards_that_are_there(half_done, finished):
    summary = half_done.run(close=True)
    assert summary["closed"]
    assert 0 < summary["num_samples"] < finished.summary["num_samples"]
    assert summary["kept"] + summary["dropped"] + summary["merged"] == summary["read"] == 42
    dropped = pl.read_parquet(half_done.store / "dropped.parquet")
    assert len(dropped) == summary["dropped"]
    left = dropped.filter(reason="not_extracted")
    assert len(left) == summary["dropped_by_reason"]["not_extracted"] > 0
    store = open_store(half_done.store)
    assert set(left["source_row"]).isdisjoint(store.index["source_row"])
    assert sum(bucket.num_samples for bucket in store.manifest.buckets) == len(store.index) == summary["num_samples"]
    whole = open_store(finished.store)
    rows = {name: row for row, name in enumerate(whole.index["sample_id"])}
    for row, name in enumerate(store.index["sample_id"]):
        sample, expected = store.read([row])[0], whole.read([rows[name]])[0]
        assert (sample.hidden_states == expected.hidden_states).all()
        assert (sample.input_ids == expected.input_ids).all()
    assert verify_store(half_done.store, deep=True) == []


def test_a_closed_store_is_finished_for_the_same_configuration(half_done):
    first = half_done.run(close=True)
    assert half_done.run()["fingerprint"] == first["fingerprint"]


def test_closing_that_was_stopped_goes_on_to_its_end(half_done, monkeypatch):
    write_index = close_module.write_index
    monkeypatch.setattr(close_module, "write_index", lambda *args: (_ for _ in ()).throw(Interrupted(15)))
    with pytest.raises(Interrupted):
        half_done.run(close=True)
    monkeypatch.setattr(close_module, "write_index", write_index)
    assert half_done.run()["closed"]
    assert verify_store(half_done.store, deep=True) == []


def test_nothing_can_be_closed_before_the_first_shard(extraction, monkeypatch):
    monkeypatch.setattr(Progress, "advance", lambda progress, num_tokens: (_ for _ in ()).throw(Interrupted(2)))
    with pytest.raises(Interrupted):
        extraction.run()
    with pytest.raises(StoreError, match="no shard is finished yet"):
        extraction.run(close=True)
