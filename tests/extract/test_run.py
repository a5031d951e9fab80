import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch

from dflash_tools.config import TargetSection
from dflash_tools.errors import ConfigError, DataError, StoreError
from dflash_tools.store import open_store
from dflash_tools.store.lock import StoreLock
from dflash_tools.store.verify import verify_store
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import load_target


def test_every_row_is_told_and_the_store_verifies(finished):
    summary = finished.summary
    assert (summary["read"], summary["kept"], summary["dropped"], summary["merged"]) == (42, 40, 2, 0)
    assert sum(summary["dropped_by_reason"].values()) == 2
    dropped = pl.read_parquet(finished.store / "dropped.parquet")
    assert dropped.columns == ["source", "source_row", "reason", "detail"]
    assert len(dropped) == 2
    assert summary["num_shards"] > 6
    assert verify_store(finished.store, deep=True) == []


def test_stored_states_are_those_of_each_sample_alone(finished, tiny_target_dir):
    """EX-02, EX-04: ids, masks and states of all samples, whatever their batch mates were."""
    store = open_store(finished.store)
    target = load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))
    for sample in store.read(range(len(store))):
        expected = capture_states(target, torch.from_numpy(sample.input_ids.astype(np.int64))[None], (1, 2, 3))[0]
        found = torch.from_numpy(sample.hidden_states).view(torch.bfloat16).float()
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)
        assert sample.loss_mask[0] == 0
        assert sample.loss_mask.any()


def test_the_last_hidden_state_is_kept_before_the_norm_on_request(extraction, tiny_target_dir):
    extraction.run("target.store_last_hidden_state=true")
    store = open_store(extraction.store)
    assert store.manifest.last_hidden_state == "pre_norm"
    sample = store.read([3])[0]
    target = load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))
    ids_BT = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    expected = capture_states(target, ids_BT, (1,), last=True)[0, :, 1]
    found = torch.from_numpy(sample.last_hidden_state).view(torch.bfloat16).float()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)


@pytest.fixture
def no_model(monkeypatch):
    """Fail if a target is loaded."""
    monkeypatch.setattr("dflash_tools.extract.states.load_target", lambda section: pytest.fail("a model was loaded"))


def test_the_dry_run_gives_the_bytes_of_the_real_run_and_writes_nothing(extraction, finished, no_model):
    """EX-01, ST-16."""
    planned = extraction.run(dry_run=True)
    assert not extraction.store.exists()
    summary = finished.summary
    assert planned["num_bytes"] == summary["num_bytes"]
    for name in ("read", "kept", "dropped", "merged", "dropped_by_reason", "num_samples", "num_tokens"):
        assert planned[name] == summary[name]
    assert sum(bucket["num_bytes"] for bucket in planned["buckets"]) == planned["num_bytes"]
    shard_files = [*finished.store.glob("buckets/*/*/c.*"), *finished.store.glob("shards/*.json")]
    assert planned["num_files"] == len(shard_files)
    assert planned["fits"]


def test_a_finished_store_is_left_as_it_is(finished, read_all, no_model):
    before = read_all(finished.store)
    assert finished.run()["extracted_tokens"] == 0
    assert read_all(finished.store) == before


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("target.dtype=bfloat16", "target.dtype"),
        ("target.target_layer_ids=[0, 2]", "target.target_layer_ids"),
        ("data.max_tokens=100", "data.max_tokens"),
        ("data.loss_on=all", "data.loss_on"),
        ("data.validation_fraction=0.5", "data.validation_fraction"),
        ("buckets.count=2", "buckets.count"),
        ("forward.token_budget=100", "forward.token_budget"),
        ("store.codec=lossless", "store.codec"),
    ],
)
def test_another_configuration_is_refused_by_field(finished, override, field):
    with pytest.raises(StoreError, match="another configuration") as error:
        finished.run(override)
    assert f"{field}: store has" in str(error.value)


def test_another_device_is_no_other_configuration(finished, no_model):
    finished.run("target.device=auto")


def test_changed_data_are_refused(extraction, finished):
    shutil.copytree(finished.store, extraction.store)
    extraction.run()
    with (extraction.folder / "chats.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(StoreError, match="data files"):
        extraction.run()


def test_overwrite_starts_anew_but_never_removes_foreign_files(extraction, finished):
    shutil.copytree(finished.store, extraction.store)
    extraction.run("target.dtype=bfloat16", overwrite=True)
    assert open_store(extraction.store).manifest.target.dtype == "bfloat16"
    (extraction.store / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match=r"holds thesis\.tex"):
        extraction.run(overwrite=True)


def test_a_folder_with_other_files_is_refused(extraction):
    extraction.store.mkdir()
    (extraction.store / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds notes\.txt"):
        extraction.run()


def test_a_limit_takes_an_unbiased_subset_that_grows(extraction):
    small, large = extraction.folder / "small", extraction.folder / "large"
    summary = extraction.run(store=small, limit=7)
    extraction.run(store=large, limit=19)
    first, second = (set(pl.read_parquet(path / "index.parquet")["sample_id"]) for path in (small, large))
    assert (len(first), len(second)) == (7, 19)
    assert first < second
    assert summary["kept"] + summary["dropped"] == summary["read"] == 42
    assert summary["dropped_by_reason"]["over_limit"] == 33


def test_a_second_extraction_of_the_same_store_is_refused(extraction):
    """ST-10."""
    with StoreLock(extraction.store), pytest.raises(StoreError, match="extracts into"):
        extraction.run()


def test_strict_stops_at_the_first_row_that_would_be_dropped(extraction):
    with pytest.raises(DataError, match=r"chats\.jsonl"):
        extraction.run(strict=True)


def test_samples_can_be_shown_before_anything_is_loaded(extraction, capsys):
    extraction.run(dry_run=True, show=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("supervised") == 2
    assert "<|im_start|>assistant" in shown.err


def test_samples_longer_than_the_target_knows_positions_are_refused(extraction, tiny_target_dir):
    with pytest.raises(ConfigError, match=r"buckets\.edges"):
        extraction.run("buckets.edges=[10, 20]", dry_run=True)
    config = json.loads((tiny_target_dir / "config.json").read_text())
    short = extraction.folder / "short"
    short.mkdir()
    for path in tiny_target_dir.iterdir():
        (short / path.name).write_bytes(path.read_bytes())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 50}))
    with pytest.raises(ConfigError, match="knows only 50 positions"):
        extraction.run(f"target.model={short}", dry_run=True)


def test_the_manifest_names_the_control_tokens_that_the_data_uses(finished):
    tokenizer = open_store(finished.store).manifest.tokenizer
    assert set(tokenizer.used_control_token_ids) < set(tokenizer.control_token_ids)
    assert 1 in tokenizer.used_control_token_ids  # <|im_start|>
    assert 3 not in tokenizer.used_control_token_ids  # <|unused|>


def test_fp8_and_lossless_stores_can_be_made(extraction):
    summary = extraction.run("store.codec=lossless", "store.hidden_states_dtype=fp8")
    manifest = open_store(extraction.store).manifest
    assert (manifest.codec, manifest.hidden_states_dtype) == ("lossless", "fp8")
    assert all(0 < error < 0.05 for error in manifest.fp8_error)
    assert summary["num_bytes"] == manifest.num_bytes
