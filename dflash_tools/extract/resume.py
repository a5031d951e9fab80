"""What is there already, and whether it may be gone on with."""

import shutil
from pathlib import Path

from dflash_tools.errors import StoreError
from dflash_tools.extract.ingest import DROPPED_NAME
from dflash_tools.extract.job import Job
from dflash_tools.extract.prepare import PREPARING_NAME, prepare
from dflash_tools.extract.record import (
    RECORD_NAME,
    ExtractionRecord,
    check_settings,
    check_versions,
    read_record,
    write_record,
)
from dflash_tools.store.arrays import METADATA_NAME, TOKEN_ARRAYS
from dflash_tools.store.commit import RECORDS_FOLDER
from dflash_tools.store.files import TEMP_SUFFIX
from dflash_tools.store.index import INDEX_NAME, index_fingerprint
from dflash_tools.store.lock import LOCK_NAME
from dflash_tools.store.manifest_file import MANIFEST_NAME
from dflash_tools.store.writer import StoreWriter

# What an extraction writes at the top of a store.
OWN_NAMES = {
    "buckets",
    DROPPED_NAME,
    INDEX_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    PREPARING_NAME,
    RECORDS_FOLDER,
    RECORD_NAME,
    "memory.json",
    "target",
}


def remove_store(store: Path) -> None:
    """Empty a store's folder, but for the lock that this process holds.

    Raises:
        StoreError: If the folder holds anything that an extraction does not write.
    """
    check_folder(store)
    for path in store.iterdir():
        if path.name == LOCK_NAME:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_folder(store: Path) -> None:
    """Refuse a folder with foreign files.

    Raises:
        StoreError: Naming one of them.
    """
    for path in sorted(store.iterdir()):
        if path.name.removesuffix(TEMP_SUFFIX) not in OWN_NAMES:
            raise StoreError(f"{store}: holds {path.name}, which no store has; give an empty or a new folder")


def open_work(
    store: Path, job: Job, *, strict: bool, threads: int, allow_versions: bool
) -> tuple[StoreWriter, ExtractionRecord]:
    """Prepare a new store, or check that an unfinished one is of this job and complete its preparation.

    Args:
        store: The store's folder, locked.
        job: What to extract.
        strict: Stop at the first row that would be dropped.
        threads: CPU threads of a new store; an unfinished one has its own.
        allow_versions: Go on under other library versions, and record them.

    Raises:
        StoreError: If the store is of another configuration.
        ResumeError: If it was begun under other library versions.
    """
    record = read_record(store)
    if record is None:
        check_folder(store)
        record = prepare(store, job, strict=strict, threads=threads)
        return StoreWriter(store, job.shape, record.buckets), record
    check_settings(store, record, job.settings)
    if not allow_versions:
        check_versions(store, record, job.versions)
    elif record.versions != job.versions:
        record = record.model_copy(update={"versions": _join_versions(record.versions, job.versions)})
        write_record(store, record)
    if not _is_prepared(store, job, record):
        if record.closed:
            raise StoreError(
                f"{store}: index, tokens or dropped rows of a closed store are lost, and the data alone cannot say "
                "which samples it had; extract anew with --overwrite"
            )
        record = prepare(store, job, strict=strict, threads=record.threads, earlier=record)
    writer = StoreWriter(store, job.shape, record.buckets)
    if not record.closed and index_fingerprint(writer.index) != record.index_fingerprint:
        raise StoreError(f"{store / INDEX_NAME}: is not the index that {RECORD_NAME} names; run extract with --repair")
    writer.create_arrays()
    return writer, record


def _is_prepared(store: Path, job: Job, record: ExtractionRecord) -> bool:
    if not (store / INDEX_NAME).is_file() or not (store / DROPPED_NAME).is_file():
        return False
    writer = StoreWriter(store, job.shape, record.buckets)
    missing = set(writer.shards()) - writer.committed()
    # A closed store needs no tokens beyond those of its shards.
    return record.closed or all((store / spec.file_name(*key)).is_file() for key in missing for spec in TOKEN_ARRAYS)


def _join_versions(earlier: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    joined = {}
    for name in earlier | now:
        versions = dict.fromkeys([*earlier.get(name, "").split(", "), now.get(name, "")])
        joined[name] = ", ".join(version for version in versions if version)
    return joined
