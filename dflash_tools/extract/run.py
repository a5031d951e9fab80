"""The extract command: prepare, make what is missing, finish."""

from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_tools.config import ExtractConfig
from dflash_tools.data import read_rows, show_sample
from dflash_tools.errors import ConfigError
from dflash_tools.extract.close import close_store
from dflash_tools.extract.dry_run import plan_extraction
from dflash_tools.extract.estimate import full_disk_explained
from dflash_tools.extract.finish import finish_store, summarise
from dflash_tools.extract.job import Job, resolve_job
from dflash_tools.extract.ranks import rank_lock, share_of, wait_for_others, wait_for_record
from dflash_tools.extract.record import RECORD_NAME, check_settings, check_versions, read_record
from dflash_tools.extract.repair import find_damage, refuse_damage, set_aside
from dflash_tools.extract.resume import open_work, remove_store
from dflash_tools.extract.states import write_states
from dflash_tools.extract.target_folder import read_identity
from dflash_tools.extract.world import World, choose_threads, read_world
from dflash_tools.progress import Progress
from dflash_tools.store.layout import shard_write_order
from dflash_tools.store.lock import StoreLock
from dflash_tools.store.manifest_file import MANIFEST_NAME, read_manifest
from dflash_tools.store.writer import StoreWriter


def run_extraction(
    config: ExtractConfig,
    config_dir: Path,
    store_dir: Path,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    show: int = 0,
    strict: bool = False,
    close: bool = False,
    repair: bool = False,
    overwrite: bool = False,
    allow_versions: bool = False,
) -> dict[str, Any]:
    """Cache the hidden states of a target over some data; go on with what an earlier start left.

    Args:
        config: extract.toml, read.
        config_dir: Its folder; paths in it are relative to that.
        store_dir: Folder of the store.
        limit: Take so many samples, the first in the order of their content hash.
        dry_run: Only count and estimate; no model is loaded and nothing written.
        show: Print so many samples to stderr, their supervised tokens marked.
        strict: Stop at the first row that would be dropped.
        close: Finish over the shards that are there.
        repair: Set damage aside and make it again.
        overwrite: Remove what is there first.
        allow_versions: Go on with a store begun under other library versions.

    Returns:
        Figures of the store by the keys of docs/extraction.md; empty in all processes but the first.

    Raises:
        ConfigError, DataError, StoreError, ResumeError: Whatever the user can fix; all finished shards stay.
    """
    world = read_world()
    if world.world_size > 1 and (close or repair or overwrite or dry_run):
        raise ConfigError("--close, --repair, --overwrite and --dry-run work in one process; run them without torchrun")
    job = resolve_job(config, config_dir, limit)
    if show and world.rank == 0:
        show_samples(job, show)
    if dry_run:
        return plan_extraction(job, store_dir, strict=strict)
    if world.rank > 0:
        _follow(store_dir, job, world, allow_versions=allow_versions)
        return {}
    with StoreLock(store_dir):
        if overwrite:
            remove_store(store_dir)
        if repair:
            _set_damage_aside(store_dir, job)
        if (store_dir / MANIFEST_NAME).exists():
            return _report_finished(store_dir, job)
        return _lead(store_dir, job, world, strict=strict, close=close, allow_versions=allow_versions)


def _set_damage_aside(store: Path, job: Job) -> None:
    """Look at every byte and set aside what is damaged, if the store is of this job."""
    if not any(store.glob("*.json")):
        return
    damage = find_damage(store, deep=True)
    if not any(item.file == RECORD_NAME for item in damage):
        record = read_record(store)
        if record is not None:
            check_settings(store, record, job.settings)
    if damage:
        _say(f"{len(damage)} damaged places set aside in {set_aside(store, damage)}")


def show_samples(job: Job, count: int) -> None:
    """Print the first samples to stderr: supervised tokens green, control tokens reversed."""
    console = Console(stderr=True, highlight=False)
    for row in read_rows(job.data, job.tokenizer, num_processes=1):
        for sample in row.samples:
            supervised = int(sample.loss_mask.sum())
            console.rule(f"{row.source} row {row.source_row}: {len(sample.input_ids)} tokens, {supervised} supervised")
            console.print(show_sample(job.tokenizer, sample))
            count -= 1
            if count == 0:
                return


def _lead(store: Path, job: Job, world: World, *, strict: bool, close: bool, allow_versions: bool) -> dict[str, Any]:
    """Prepare, make this process's share, wait for the others, finish."""
    threads = choose_threads(job.config.forward.threads, world)
    with full_disk_explained(store, "token ids are written"):
        writer, record = open_work(store, job, strict=strict, threads=threads, allow_versions=allow_versions)
    if close or record.closed:
        writer, record = close_store(store, writer, record)
    order = write_order(writer)
    committed = writer.committed()
    missing = [key for key in share_of(order, world) if key not in committed]
    seconds, num_tokens = 0.0, 0
    with Progress("extract", _count_tokens(writer, missing), "tokens") as progress:
        if missing or read_identity(store) is None:
            if len(missing) < len(order) and missing and world.world_size == 1:
                progress.say(f"{len(order) - len(missing)} of {len(order)} shards are there, {len(missing)} to go")
            written = write_states(writer, job, record, missing, progress, write_target=True)
            seconds, num_tokens = written.seconds, written.num_tokens
        wait_for_others(writer, order, world, progress)
    with full_disk_explained(store, "the manifest is written"):
        manifest = finish_store(store, writer, record, job.settings)
    return summarise(store, manifest, record) | {
        "extracted_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_tokens / seconds, 1) if seconds else 0.0,
    }


def _follow(store: Path, job: Job, world: World, *, allow_versions: bool) -> None:
    """Make the share of a process that is not the first."""
    with rank_lock(store, world.rank):
        record = wait_for_record(store)
        if record is None:
            return
        check_settings(store, record, job.settings)
        if not allow_versions:
            check_versions(store, record, job.versions)
        writer = StoreWriter(store, job.shape, record.buckets)
        committed = writer.committed()
        missing = [key for key in share_of(write_order(writer), world) if key not in committed]
        if missing:
            with Progress("extract", _count_tokens(writer, missing), "tokens", silent=True) as progress:
                write_states(writer, job, record, missing, progress, write_target=False)


def write_order(writer: StoreWriter) -> list[tuple[int, int]]:
    """All shards in the order in which they are made: shuffled, one of the longest first."""
    index = writer.index
    columns = (index[name].to_numpy() for name in ("bucket_id", "shard_id", "num_tokens"))
    return shard_write_order(*columns)


def _report_finished(store: Path, job: Job) -> dict[str, Any]:
    """Say that a store is finished already, if it is of this job and whole."""
    refuse_damage(store, find_damage(store, deep=False))
    record = read_record(store)
    assert record is not None, "a store that passes verify has its extraction.json"
    check_settings(store, record, job.settings)
    _say(f"{store} is finished already; nothing to do")
    return summarise(store, read_manifest(store), record) | {
        "extracted_tokens": 0,
        "seconds": 0.0,
        "tokens_per_second": 0.0,
    }


def _count_tokens(writer: StoreWriter, shards: list[tuple[int, int]]) -> int:
    return sum(int(writer.samples_of(*key)["num_tokens"].sum()) for key in shards)


def _say(sentence: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, markup=False)
