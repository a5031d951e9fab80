"""Caches of three tools become stores, bit for bit."""

import errno
import gzip
import json
import os

import numpy as np
import polars as pl
import pytest
import torch
from foreign_caches import LAYERS, LENGTHS, WRITERS, modelopt_content, save_torch, specforge_content, write_modelopt

from dflash_tools.errors import ConfigError, DataError, Interrupted, StoreError
from dflash_tools.store import open_store
from dflash_tools.store.files import write_file
from dflash_tools.store.verify import verify_store


def bits(tensor):
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def contents(store):
    """Every file of a store by name."""
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.mark.parametrize("tool", WRITERS)
def test_every_value_of_a_cache_comes_back_bit_for_bit(tool, tmp_path, made, convert, small_shards, by_ids):
    """EX-02: ids, mask and states of a sample stay together."""
    source = WRITERS[tool](tmp_path / "cache", made)
    summary = convert(source, tool, tmp_path / "store", keep_last_hidden_state=True)
    assert (summary["read"], summary["kept"], summary["num_tokens"]) == (len(made), len(made), sum(LENGTHS))
    assert summary["num_shards"] > 3
    assert verify_store(tmp_path / "store", deep=True) == []
    store = open_store(tmp_path / "store")
    found = by_ids(store)
    for sample in made:
        stored = found[tuple(sample.ids.tolist())]
        assert np.array_equal(stored.hidden_states, bits(sample.states))
        assert np.array_equal(stored.loss_mask, sample.mask.numpy())
        last = sample.last if tool == "speculators" else sample.normed
        assert np.array_equal(stored.last_hidden_state, bits(last))
    assert store.manifest.target_layer_ids == LAYERS
    assert store.manifest.last_hidden_state == ("pre_norm" if tool == "speculators" else "post_norm")


def test_a_finished_store_is_left_alone_and_other_options_are_refused(tmp_path, made, convert, capsys):
    source = write_modelopt(tmp_path / "cache", made)
    first = convert(source, "modelopt", tmp_path / "store")
    before = contents(tmp_path / "store")
    assert convert(source, "modelopt", tmp_path / "store") == first
    assert "finished already" in capsys.readouterr().err
    with pytest.raises(StoreError, match=r'--codec: store has "none", now "lossless"'):
        convert(source, "modelopt", tmp_path / "store", codec="lossless")
    assert contents(tmp_path / "store") == before


def test_samples_of_one_conversation_fall_on_one_side_of_the_split(tmp_path, made, convert):
    source = write_modelopt(tmp_path / "cache", made)
    convert(source, "modelopt", tmp_path / "store", validation_fraction=0.5)
    index = open_store(tmp_path / "store").index
    assert index["split"].n_unique() == 2
    assert index.group_by("conversation_id").agg(pl.col("split").n_unique())["split"].to_list() == [1] * 6


def spoil(source, made):
    """Add one file of every kind that cannot become a sample; returns name -> reason."""
    whole = (source / "0000.pt").read_bytes()
    good = modelopt_content(made[3], "talk-99")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (source / "a-empty.pt").write_bytes(b"")
    (source / "b-truncated.pt").write_bytes(whole[: len(whole) // 2])
    (source / "c-truncated.pt.gz").write_bytes(gzip.compress(whole)[:-20])
    (source / "d-flipped.pt").write_bytes(bytes(flipped))
    states = good["aux_hidden_states"]
    with_nan = states.clone().index_fill_(0, torch.tensor([5]), float("nan"))
    save_torch(source / "e-nan.pt", good | {"aux_hidden_states": with_nan})
    save_torch(source / "f-inf.pt", good | {"aux_hidden_states": states.float() * 1e38 * 1e5})
    save_torch(source / "g-short.pt", good | {"aux_hidden_states": states[:-1]})
    save_torch(source / "h-mask.pt", good | {"loss_mask": good["loss_mask"][:-1]})
    save_torch(source / "i-single.pt", good | {"loss_mask": torch.arange(64) % 2 == 0})
    save_torch(source / "j-key.pt", {name: value for name, value in good.items() if name != "aux_hidden_states"})
    save_torch(source / "k-flat.pt", good | {"aux_hidden_states": states.reshape(-1)})
    save_torch(source / "l-list.pt", [1, 2, 3])
    (source / "m-text.pt").write_text("not a torch file")
    (source / "notes.txt").write_text("not of the cache")
    return {
        "a-empty.pt": "unreadable",
        "b-truncated.pt": "unreadable",
        "c-truncated.pt.gz": "unreadable",
        "d-flipped.pt": "unreadable",
        "e-nan.pt": "not_finite",
        "f-inf.pt": "not_finite",
        "g-short.pt": "length_mismatch",
        "h-mask.pt": "length_mismatch",
        "i-single.pt": "too_few_supervised",
        "j-key.pt": "missing_key",
        "k-flat.pt": "wrong_shape",
        "l-list.pt": "not_only_tensors",
        "m-text.pt": "unreadable",
    }


def test_every_file_is_kept_or_dropped_with_a_reason(tmp_path, made, convert, small_shards):
    """ST-05, EX-08: damage, infinite values and half samples are named; the rest is kept whole."""
    source = write_modelopt(tmp_path / "cache", made)
    expected = spoil(source, made)
    summary = convert(source, "modelopt", tmp_path / "store")
    dropped = pl.read_parquet(tmp_path / "store" / "dropped.parquet")
    assert {row["detail"].split(":")[0]: row["reason"] for row in dropped.iter_rows(named=True)} == expected
    assert (summary["read"], summary["kept"]) == (len(made) + len(expected), len(made))
    assert summary["other_files"] == 1
    assert sum(summary["dropped_by_reason"].values()) == summary["dropped"] == len(expected)
    assert verify_store(tmp_path / "store", deep=True) == []
    assert open_store(tmp_path / "store").manifest.num_samples == len(made)


def test_stopping_anywhere_and_going_on_gives_the_same_store(tmp_path, made, convert, small_shards, monkeypatch):
    """ST-04, EX-17: whatever was being renamed; samples that turn out bad on the way included."""
    source = write_modelopt(tmp_path / "cache", made)
    spoil(source, made)
    renames = 0

    def counted(path, buffers):
        nonlocal renames
        renames += 1
        if renames == stop_at:
            raise Interrupted(15)
        return write_file(path, buffers)

    store_modules = ("store.writer", "store.commit", "store.index", "store.manifest_file")
    for module in (*store_modules, "convert.prepare", "convert.record"):
        monkeypatch.setattr(f"dflash_tools.{module}.write_file", counted)
    stop_at = 0
    reference = convert(source, "modelopt", tmp_path / "reference")
    num_renames = renames
    for stop_at in range(3, num_renames + 1, num_renames // 4):
        renames = 0
        store = tmp_path / f"stopped-{stop_at}"
        with pytest.raises(Interrupted):
            convert(source, "modelopt", store)
        made_before = {path: path.stat().st_mtime_ns for path in store.glob("shards/*.json")}
        stop_at = 0
        assert convert(source, "modelopt", store) | {"store": ""} == reference | {"store": ""}
        assert {path: path.stat().st_mtime_ns for path in made_before} == made_before, "a finished shard was redone"
        assert contents(store) == contents(tmp_path / "reference")


def test_a_stop_while_the_target_is_written_leaves_nothing_that_counts(tmp_path, made, convert, monkeypatch):
    source = write_modelopt(tmp_path / "cache", made)

    def torn(target, tokenizer, folder):
        folder.mkdir()
        (folder / "frozen.safetensors").write_bytes(b"half")
        raise Interrupted(15)

    with monkeypatch.context() as patch:
        patch.setattr("dflash_tools.convert.prepare.write_target_folder", torn)
        with pytest.raises(Interrupted):
            convert(source, "modelopt", tmp_path / "store")
    convert(source, "modelopt", tmp_path / "store")
    assert verify_store(tmp_path / "store", deep=True) == []
    convert(source, "modelopt", tmp_path / "reference")
    assert contents(tmp_path / "store") == contents(tmp_path / "reference")


def test_a_full_disk_stops_cleanly_and_is_resumed(tmp_path, made, convert, small_shards, monkeypatch):
    """ST-13."""
    source = write_modelopt(tmp_path / "cache", made)
    writev, calls = os.writev, 0

    def full(descriptor, buffers):
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(StoreError, match="the disk is full; make room and run the same command again"):
            convert(source, "modelopt", tmp_path / "store")
    assert not list((tmp_path / "store").rglob("*.tmp"))
    convert(source, "modelopt", tmp_path / "store")
    assert verify_store(tmp_path / "store", deep=True) == []


def test_what_will_not_fit_is_said_before_any_state_is_copied(tmp_path, made, convert, monkeypatch):
    """EX-01."""
    monkeypatch.setattr("dflash_tools.store.writer.StoreWriter.free_bytes", lambda writer: 1000)
    monkeypatch.setattr("dflash_tools.convert.run.write_shards", lambda *args: pytest.fail("states were copied"))
    with pytest.raises(StoreError, match=r"need about .* GB and .* are free; .*--codec lossless"):
        convert(write_modelopt(tmp_path / "cache", made), "modelopt", tmp_path / "store")


@pytest.mark.parametrize(("dtype", "codec"), [("bfloat16", "lossless"), ("fp8", "none")])
def test_other_codecs_of_the_store_work_too(dtype, codec, tmp_path, made, convert, by_ids):
    source = write_modelopt(tmp_path / "cache", made)
    convert(source, "modelopt", tmp_path / "store", hidden_states_dtype=dtype, codec=codec)
    assert verify_store(tmp_path / "store", deep=True) == []
    store = open_store(tmp_path / "store")
    assert (store.manifest.hidden_states_dtype, store.manifest.codec) == (dtype, codec)
    assert (store.manifest.fp8_error is not None) == (dtype == "fp8")
    found = by_ids(store)[tuple(made[3].ids.tolist())].hidden_states
    assert np.array_equal(found, bits(made[3].states)) == (dtype == "bfloat16")


def test_a_file_that_changes_between_starts_is_refused(tmp_path, made, convert, small_shards, monkeypatch):
    source = write_modelopt(tmp_path / "cache", made)

    def stop(*args):
        raise Interrupted(15)

    with monkeypatch.context() as patch:
        patch.setattr("dflash_tools.convert.fill._write", stop)
        with pytest.raises(Interrupted):
            convert(source, "modelopt", tmp_path / "store")
    changed = modelopt_content(made[0], "talk-0")
    changed["input_ids"] = changed["input_ids"].flip(0)
    save_torch(source / "0000.pt", changed)
    with pytest.raises(StoreError, match=r"0000\.pt: has other token ids"):
        convert(source, "modelopt", tmp_path / "store")
    (source / "0000.pt").unlink()
    with pytest.raises(StoreError, match=r"files of SOURCE: store has \"12 files of"):
        convert(source, "modelopt", tmp_path / "store")


def test_a_file_that_is_mended_after_a_stop_is_kept_and_not_told_as_dropped(tmp_path, made, convert, monkeypatch):
    source = write_modelopt(tmp_path / "cache", made)
    whole = (source / "0003.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (source / "0003.pt").write_bytes(flipped)

    def stop(*args):
        raise Interrupted(15)

    with monkeypatch.context() as patch:
        patch.setattr("dflash_tools.convert.fill.write_index", stop)
        with pytest.raises(Interrupted):
            convert(source, "modelopt", tmp_path / "store")
    assert len(pl.read_parquet(tmp_path / "store" / "dropped.parquet")) == 1
    (source / "0003.pt").write_bytes(whole)
    summary = convert(source, "modelopt", tmp_path / "store")
    assert (summary["kept"], summary["dropped"], summary["num_samples"]) == (12, 0, 12)
    assert verify_store(tmp_path / "store", deep=True) == []


def test_padding_is_removed_and_repeats_have_ids_of_their_own(tmp_path, made, convert, by_ids, tiny_target_dir):
    pad = json.loads((tiny_target_dir / "config.json").read_text())["pad_token_id"]
    source = tmp_path / "cache"
    for number in range(2):
        save_torch(source / f"data_{number}.ckpt", specforge_content(made[1]))
    padded = {
        "input_ids": torch.nn.functional.pad(made[3].ids, (0, 30), value=pad),
        "loss_mask": torch.nn.functional.pad(made[3].mask, (0, 30)),
        "hidden_states": torch.nn.functional.pad(made[3].states.flatten(1)[None], (0, 0, 0, 30)),
    }
    save_torch(source / "data_2.ckpt", padded)
    summary = convert(source, "specforge", tmp_path / "store")
    assert summary["notes"] == {"padding_removed": 1}
    assert summary["num_tokens"] == 2 * LENGTHS[1] + LENGTHS[3]
    store = open_store(tmp_path / "store")
    assert store.index["sample_id"].n_unique() == 3
    assert np.array_equal(by_ids(store)[tuple(made[3].ids.tolist())].hidden_states, bits(made[3].states))
    assert verify_store(tmp_path / "store", deep=True) == []


def test_states_of_other_dtypes_are_rounded_and_counted(tmp_path, made, convert, by_ids):
    content = specforge_content(made[1])
    save_torch(tmp_path / "cache" / "data_0.ckpt", content | {"hidden_states": content["hidden_states"].float()})
    summary = convert(tmp_path / "cache", "specforge", tmp_path / "store")
    assert summary["notes"] == {"rounded_to_bfloat16": 1}
    stored = by_ids(open_store(tmp_path / "store"))[tuple(made[1].ids.tolist())]
    assert np.array_equal(stored.hidden_states, bits(made[1].states))


def test_a_cache_without_usable_files_says_why(tmp_path, made, convert):
    save_torch(tmp_path / "cache" / "0.pt", specforge_content(made[0]))
    with pytest.raises(DataError, match=r"none of 1 files became a sample; 1 were dropped as missing_key.*aux_hidden"):
        convert(tmp_path / "cache", "modelopt", tmp_path / "store")
    with pytest.raises(DataError, match=r"holds no file that ends in \.safetensors"):
        convert(tmp_path / "cache", "speculators", tmp_path / "other")


def test_a_folder_with_foreign_files_or_inside_the_cache_is_refused(tmp_path, made, convert):
    source = write_modelopt(tmp_path / "cache", made)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").touch()
    with pytest.raises(StoreError, match=r"holds thesis\.txt"):
        convert(source, "modelopt", tmp_path / "store")
    with pytest.raises(ConfigError, match="lies inside SOURCE"):
        convert(source, "modelopt", source / "store")
