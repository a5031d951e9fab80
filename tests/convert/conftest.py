"""Caches of other tools and a call that converts them."""

from functools import partial

import pytest
from foreign_caches import LAYERS, SHARD_BYTES, SHARD_TOKENS, make_samples

from dflash_tools.convert.run import run_conversion
from dflash_tools.train.world import Threads


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    with Threads(1):
        yield


@pytest.fixture(scope="session")
def made(tiny_target_dir):
    return make_samples(tiny_target_dir)


@pytest.fixture
def small_shards(monkeypatch):
    """Cut stores into several shards of a few kilobytes."""
    monkeypatch.setattr("dflash_tools.store.layout.MIN_SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr("dflash_tools.convert.prepare.FORWARD_TOKEN_BUDGET", SHARD_TOKENS)


@pytest.fixture
def convert(tiny_target_dir):
    """Convert with the tiny target, its layers counted as z-lab does."""
    return partial(
        run_conversion, target=str(tiny_target_dir), target_layer_ids=LAYERS, layer_ids_are="zlab", dtype="float32",
        buckets=2,
    )  # fmt: skip


@pytest.fixture
def by_ids():
    """Give the function that maps the token ids of every sample of a store to the sample."""

    def read(store):
        return {tuple(sample.input_ids.tolist()): sample for sample in store.read(range(len(store.index)))}

    return read
