import os

import numpy as np
import pytest

from dflash_tools.store import files


def test_buffers_are_written_one_after_another(tmp_path):
    buffers = [b"abc", np.arange(5, dtype=np.uint8), b"", b"z"]
    size = files.write_file(tmp_path / "a", iter(buffers))
    content = (tmp_path / "a").read_bytes()
    assert content == b"abc\x00\x01\x02\x03\x04z"
    assert size == 9


def test_a_write_that_the_kernel_cuts_short_goes_on(tmp_path, monkeypatch):
    real = os.writev

    def short(descriptor, buffers):
        return real(descriptor, [bytes(buffers[0])[:7]])

    monkeypatch.setattr(files.os, "writev", short)
    files.write_file(tmp_path / "a", [b"0123456789" * 3, b"end"])
    assert (tmp_path / "a").read_bytes() == b"0123456789" * 3 + b"end"


def test_many_buffers_need_several_calls(tmp_path):
    files.write_file(tmp_path / "a", [bytes([i % 256]) for i in range(3000)])
    assert (tmp_path / "a").stat().st_size == 3000


def test_a_full_disk_leaves_neither_file_nor_temp_file(tmp_path, monkeypatch):
    """ST-13."""

    def full(descriptor, buffers):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_file(tmp_path / "a", [b"abc"])
    assert list(tmp_path.iterdir()) == []


def test_the_old_file_stays_until_the_new_one_is_on_disk(tmp_path, monkeypatch):
    """ST-14: a stop before the rename leaves the old content."""
    files.write_file(tmp_path / "a", [b"old"])

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.write_file(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"old"


def test_folders_are_made_with_their_parents(tmp_path):
    files.make_folder(tmp_path / "a" / "b" / "c")
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_an_error_of_the_disk_in_mid_write_is_raised(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.write_file(tmp_path / "a", (bytes(9 << 20) for _ in range(3)))
    assert list(tmp_path.iterdir()) == []
