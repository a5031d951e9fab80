"""A tiny extraction of several shards, run in this process."""

from pathlib import Path

import pytest
import torch
from small_extraction import SHARD_BYTES, write_config

from dflash_tools.config import ExtractConfig, load_config
from dflash_tools.extract.run import run_extraction


class Extraction:
    """A folder with data and config, and its store."""

    def __init__(self, folder: Path, target: Path, **changes):
        self.folder = folder
        self.config = write_config(folder, target, **changes)
        self.store = folder / "store"

    def run(self, *overrides, store=None, **options):
        settings = load_config(self.config, ExtractConfig, overrides)
        return run_extraction(settings, self.folder, store or self.store, **options)


@pytest.fixture
def extraction(tmp_path, tiny_target_dir, monkeypatch):
    """Make an extraction of about ten small shards."""
    monkeypatch.setattr("dflash_tools.store.layout.MIN_SHARD_BYTES", SHARD_BYTES)
    threads = torch.get_num_threads()
    yield Extraction(tmp_path, tiny_target_dir)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_target_dir):
    """Make a finished store once; tests must leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_tools.store.layout.MIN_SHARD_BYTES", SHARD_BYTES)
        made = Extraction(tmp_path_factory.mktemp("finished"), tiny_target_dir)
        threads = torch.get_num_threads()
        made.summary = made.run()
        torch.set_num_threads(threads)
    return made


def contents(store: Path) -> dict[str, bytes]:
    """Every file of a store by name."""
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.fixture
def read_all():
    """Give the function that reads every file of a store."""
    return contents
