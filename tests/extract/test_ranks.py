import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.errors import ConfigError, StoreError
from dflash_tools.extract.ranks import is_alive, rank_lock, remove_signs, share_of, wait_for_others, wait_for_record
from dflash_tools.extract.world import World, choose_threads, read_world
from dflash_tools.progress import Progress

SILENT = Progress("extract", 1, "tokens", silent=True)


class Writer:
    """What wait_for_others asks of a StoreWriter."""

    def __init__(self, store, committed):
        self.store = store
        self._committed = committed

    def committed(self):
        return set(self._committed)


@given(st.integers(0, 40), st.integers(1, 6))
def test_every_shard_belongs_to_exactly_one_process(num_shards, world_size):
    shards = [(0, shard) for shard in range(num_shards)]
    shares = [share_of(shards, World(rank, world_size)) for rank in range(world_size)]
    assert sorted(shard for share in shares for shard in share) == shards
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_lives_while_it_holds_its_lock(tmp_path):
    assert not is_alive(tmp_path / "store", 1)
    with rank_lock(tmp_path / "store", 1):
        assert is_alive(tmp_path / "store", 1)
    assert not is_alive(tmp_path / "store", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_not_taken_for_a_living_one(tmp_path):
    child = os.fork()
    if child == 0:
        lock = rank_lock(tmp_path / "store", 1)
        lock.__enter__()
        os._exit(0)  # without releasing: the lock file stays
    os.waitpid(child, 0)
    assert (tmp_path / "store.ranks" / "1" / "extract.lock").exists()
    assert not is_alive(tmp_path / "store", 1)


def test_the_first_process_waits_until_the_others_are_through(tmp_path):
    wait_for_others(
        Writer(tmp_path / "store", {(0, 0), (0, 1)}),
        [(0, 0), (0, 1)],
        World(0, 2),
        SILENT,
    )


def test_the_others_stop_if_the_first_process_is_gone_before_the_store_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_tools.extract.ranks.START_SECONDS", 0.0)
    tmp_path.joinpath("store").mkdir()
    with pytest.raises(StoreError, match="the first process ended before the store was prepared"):
        wait_for_record(tmp_path / "store")


def test_a_killed_process_that_nobody_waited_for_is_dead(tmp_path):
    child = os.fork()
    if child == 0:
        lock = rank_lock(tmp_path / "store", 1)
        lock.__enter__()
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (tmp_path / "store.ranks").exists() or is_alive(tmp_path / "store", 1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.waitpid(child, 0)


def test_signs_of_killed_processes_are_removed(tmp_path):
    lock = tmp_path / "store.ranks" / "3" / "extract.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("{}")
    remove_signs(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ended_with_shards_to_go_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_tools.extract.ranks.START_SECONDS", 0.0)
    with pytest.raises(StoreError, match="process 1 of 2 ended with 1 shards to go; run the same command again"):
        wait_for_others(
            Writer(tmp_path / "store", {(0, 0)}),
            [(0, 0), (0, 1)],
            World(0, 2),
            SILENT,
        )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, World(2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, World(1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, World(0, 1)),
    ],
)
def test_the_launcher_s_environment_says_which_process_this_is(monkeypatch, environment, expected):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_world() == expected


def test_a_rank_beyond_the_world_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK = 2 but WORLD_SIZE = 2"):
        read_world()


def test_threads_are_all_cores_alone_one_beside_others_or_as_set():
    assert choose_threads("auto", World(0, 1)) == len(os.sched_getaffinity(0))
    assert choose_threads("auto", World(0, 4)) == 1
    assert choose_threads(3, World(0, 4)) == 3


@pytest.mark.parametrize("option", ["close", "repair", "overwrite", "dry_run"])
def test_what_changes_a_store_as_a_whole_is_refused_under_several_processes(finished, monkeypatch, option):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        finished.run(**{option: True})
