"""Stopped by a signal, a full disk, missing memory or a bad value: what is finished stays, the end is the same."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_extraction import write_config

from dflash_tools.errors import Interrupted, ResumeError, StoreError
from dflash_tools.extract import forward as forward_module
from dflash_tools.progress import Progress
from dflash_tools.store.commit import committed_shards, read_record
from dflash_tools.store.verify import verify_store

PROGRAM = Path(__file__).parents[1] / "small_extraction.py"


def run_program(folder, *cases):
    """Run and kill extractions in processes of their own; returns exit codes by case, and stderr."""
    result = subprocess.run(
        [sys.executable, PROGRAM, folder / "extract.toml", folder, *cases],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def check_cases(folder, read_all, *cases):
    codes, errors = run_program(folder, *cases)
    reference = read_all(folder / "reference")
    for case in cases:
        assert codes[case][-1] == 0, (case, codes[case], errors)
        assert read_all(folder / case) == reference, case
    return codes


def test_a_killed_extraction_resumes_to_the_same_bytes(tmp_path, tiny_target_dir, read_all):
    """ST-04, EX-17, method test (k); and two processes give the store of one."""
    write_config(tmp_path, tiny_target_dir)
    codes = check_cases(tmp_path, read_all, "0.1", "0.6", "0.93", "ranks:2")
    assert [codes[case][0] for case in ("0.1", "0.6", "0.93")] == [-9, -9, -9]
    assert codes["ranks:2"] == [0, 0]


@pytest.mark.slow
def test_fifty_kills_all_resume_to_the_same_bytes(tmp_path, tiny_target_dir, read_all):
    write_config(tmp_path, tiny_target_dir)
    cases = [f"{point / 50:.3f}" for point in range(50)]
    codes = check_cases(tmp_path, read_all, *cases)
    assert all(codes[case][0] == -9 for case in cases)


@pytest.mark.slow
def test_four_processes_and_a_killed_one_give_the_store_of_one_process(tmp_path, tiny_target_dir, read_all):
    """ST-02: no two processes write the same shard."""
    write_config(tmp_path, tiny_target_dir)
    codes = check_cases(tmp_path, read_all, "ranks:1", "ranks:4", "ranks:2:0.7")
    assert codes["ranks:4"] == [0, 0, 0, 0]
    assert codes["ranks:2:0.7"][0] == -9


def test_a_signal_leaves_everything_resumable(extraction, finished, read_all, monkeypatch):
    advance, batches = Progress.advance, 0

    def interrupted(progress, num_tokens):
        nonlocal batches
        batches += 1
        if batches == 9:
            raise Interrupted(15)
        advance(progress, num_tokens)

    monkeypatch.setattr(Progress, "advance", interrupted)
    with pytest.raises(Interrupted):
        extraction.run()
    done = committed_shards(extraction.store)
    assert done
    made = []
    monkeypatch.setattr(Progress, "advance", lambda progress, num_tokens: made.append(num_tokens))
    extraction.run()
    # Exactly the missing shards were run: their tokens and no others.
    kept = sum(sample.num_tokens for key in done for sample in read_record(extraction.store, *key).samples)
    assert sum(made) == finished.summary["num_tokens"] - kept
    assert read_all(extraction.store) == read_all(finished.store)


def test_running_out_of_memory_halves_batches_and_is_remembered(extraction, monkeypatch):
    """EX-16: the failing batch is cut, the size that fits is kept for later starts, and no sample is lost."""
    capture, tried = forward_module.capture_states, []

    def short_of_memory(target, ids_BT, *args, **kwargs):
        tried.append(ids_BT.numel())
        if ids_BT.numel() > 100 and ids_BT.shape[0] > 1:
            raise torch.OutOfMemoryError
        return capture(target, ids_BT, *args, **kwargs)

    monkeypatch.setattr(forward_module, "capture_states", short_of_memory)
    extraction.run()
    assert max(tried[20:]) <= 130, "a size that failed was tried again"
    assert verify_store(extraction.store, deep=True) == []
    assert not (extraction.store / "memory.json").exists()
    records = [read_record(extraction.store, *key) for key in committed_shards(extraction.store)]
    assert any(record.split_forward_ids for record in records)


def test_a_single_sample_that_does_not_fit_is_named(extraction, monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(forward_module, "capture_states", no_memory)
    with pytest.raises(StoreError, match=r"sample [0-9a-f]{32} \(chats\.jsonl row \d+\): \d+ tokens do not fit"):
        extraction.run()


def test_a_value_that_is_not_finite_is_refused_with_its_sample(extraction, monkeypatch):
    """EX-08: and what was finished before stays."""
    capture = forward_module.capture_states

    def spoilt(target, ids_BT, *args, **kwargs):
        states_BTKH = capture(target, ids_BT, *args, **kwargs).clone()
        if ids_BT.shape[0] > 1:
            states_BTKH[1, 0, 1, 0] = float("inf")
        return states_BTKH

    monkeypatch.setattr(forward_module, "capture_states", spoilt)
    with pytest.raises(StoreError, match=r"sample [0-9a-f]{32}.*infinite or NaN"):
        extraction.run()
    assert not (extraction.store / "manifest.json").exists()


def test_a_full_disk_stops_cleanly_and_is_resumed(extraction, finished, read_all, monkeypatch):
    """ST-13."""
    writev, calls, limit = os.writev, 0, 20

    def full(descriptor, buffers):
        nonlocal calls
        calls += 1
        if calls > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, buffers)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError, match=r"the disk is full while token ids are written"):
        extraction.run(store=extraction.folder / "early")
    calls, limit = 0, 80
    with pytest.raises(StoreError, match=r"the disk is full with \d+ of \d+ shards to go.*--close"):
        extraction.run()
    assert not list(extraction.store.rglob("*.tmp"))
    assert committed_shards(extraction.store)
    monkeypatch.setattr(os, "writev", writev)
    extraction.run()
    assert read_all(extraction.store) == read_all(finished.store)


def test_what_will_not_fit_is_said_before_the_target_loads(extraction, monkeypatch):
    monkeypatch.setattr("dflash_tools.extract.states.load_target", lambda section: pytest.fail("a model was loaded"))
    needed = extraction.run(dry_run=True)["num_bytes"]
    free = (64 << 20) + int(needed * 0.6)
    monkeypatch.setattr("dflash_tools.extract.estimate.free_bytes", lambda folder: free)
    monkeypatch.setattr("dflash_tools.extract.dry_run.free_bytes", lambda folder: free)
    planned = extraction.run(dry_run=True)
    assert not planned["fits"]
    assert any("fp8" in choice for choice in planned["would_fit"])
    with pytest.raises(StoreError, match=r"are free; what would fit: .*fp8"):
        extraction.run()


def test_other_library_versions_are_refused_unless_allowed(extraction, monkeypatch):
    monkeypatch.setattr(Progress, "advance", lambda progress, num_tokens: (_ for _ in ()).throw(Interrupted(2)))
    with pytest.raises(Interrupted):
        extraction.run()
    monkeypatch.undo()
    monkeypatch.setattr("dflash_tools.store.layout.MIN_SHARD_BYTES", 40_000)
    versions = "dflash_tools.extract.job.library_versions"
    monkeypatch.setattr(versions, lambda: {"dflash-tools": "0.0", "torch": "99.0"})
    with pytest.raises(ResumeError, match=r"torch .* -> 99\.0"):
        extraction.run()
    extraction.run(allow_versions=True)
    manifest = json.loads((extraction.store / "manifest.json").read_text())
    assert manifest["versions"]["torch"].endswith(", 99.0")


def test_tokens_beyond_the_target_s_vocabulary_are_refused(extraction, tiny_target_dir):
    short = extraction.folder / "short"
    short.mkdir()
    for path in tiny_target_dir.iterdir():
        (short / path.name).write_bytes(path.read_bytes())
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"vocab_size": 250}))
    with pytest.raises(Exception, match="only 250 embedding rows"):
        extraction.run(f"target.model={short}")


def test_equal_lengths_give_equal_bytes_of_ids_whatever_the_dtype(extraction, finished):
    """Layout, ids and masks follow from the data alone."""
    extraction.run("target.dtype=bfloat16")
    for path in sorted(finished.store.glob("buckets/*/*/c.*")):
        if path.parent.name != "hidden_states":
            assert (extraction.store / path.relative_to(finished.store)).read_bytes() == path.read_bytes()
    assert (extraction.store / "index.parquet").read_bytes() == (finished.store / "index.parquet").read_bytes()
