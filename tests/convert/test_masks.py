"""Loss masks that lie apart from the states."""

import shutil

import polars as pl
import pytest
from foreign_caches import save_torch, specforge_content, write_speculators

from dflash_tools.errors import ConfigError, DataError
from dflash_tools.store import open_store


def test_masks_are_found_above_the_states_or_where_they_are_said_to_be(tmp_path, made, convert):
    dataset = write_speculators(tmp_path / "data", made)
    supervised = sum(int(sample.mask.sum()) for sample in made)
    assert convert(dataset / "hidden_states", "speculators", tmp_path / "a")["num_supervised_tokens"] == supervised
    shutil.move(dataset / "hidden_states", tmp_path / "states")
    with pytest.raises(ConfigError, match=r"hs_\d+\.safetensors: has no loss_mask.*--masks.*--loss-on all"):
        convert(tmp_path / "states", "speculators", tmp_path / "b")
    summary = convert(tmp_path / "states", "speculators", tmp_path / "b", masks=dataset)
    assert summary["num_supervised_tokens"] == supervised


def test_all_tokens_are_supervised_only_when_asked_for(tmp_path, made, convert):
    dataset = write_speculators(tmp_path / "data", made)
    summary = convert(dataset, "speculators", tmp_path / "store", loss_on="all")
    assert summary["num_supervised_tokens"] == summary["num_tokens"]
    assert open_store(tmp_path / "store").manifest.data.loss_on == "all"
    with pytest.raises(ConfigError, match="contradict each other"):
        convert(dataset, "speculators", tmp_path / "other", loss_on="all", masks=dataset)


def test_a_file_of_another_row_is_dropped(tmp_path, made, convert):
    dataset = write_speculators(tmp_path / "data", made)
    states = dataset / "hidden_states"
    shutil.copy(states / "hs_3.safetensors", states / "hs_4.safetensors")
    shutil.copy(states / "hs_3.safetensors", states / "hs_99.safetensors")
    summary = convert(dataset, "speculators", tmp_path / "store")
    assert summary["dropped_by_reason"] == {"mask_mismatch": 1, "no_mask": 1}
    details = pl.read_parquet(tmp_path / "store" / "dropped.parquet")["detail"].to_list()
    assert any("hs_4.safetensors: its ids are not those of row 4" in detail for detail in details)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path, made, convert):
    save_torch(tmp_path / "cache" / "0.ckpt", specforge_content(made[0]))
    with pytest.raises(DataError, match="check --masks"):
        convert(tmp_path / "cache", "specforge", tmp_path / "store", masks=tmp_path)
