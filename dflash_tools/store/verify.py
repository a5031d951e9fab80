"""Checking a store by its bytes: sizes and checksums first, and only what passed them is parsed."""

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.store import commit
from dflash_tools.store.arrays import shape_of, shard_arrays
from dflash_tools.store.damage import Damage
from dflash_tools.store.files import files_below
from dflash_tools.store.index import INDEX_NAME, index_fingerprint, read_index
from dflash_tools.store.lock import LOCK_NAME
from dflash_tools.store.manifest_file import MANIFEST_NAME, read_manifest
from dflash_tools.store.shard_check import ShardCheck

FAST_HASH_BYTES = 1 << 20  # without --deep, larger files than this are checked by size alone (the index never)


def verify_store(path: str | Path, *, deep: bool = False) -> list[Damage]:
    """Look for damage.

    Args:
        path: The store's folder.
        deep: Hash every byte and look at every value; else sizes, small files, the index and all commit records.

    Returns:
        Everything found, by file name; empty for a whole store.

    Raises:
        StoreError: If there is no such folder.
    """
    store = Path(path)
    if not store.is_dir():
        raise StoreError(f"{store}: no such folder; give the folder of a store")
    found: list[Damage] = []
    try:
        manifest: StoreManifest | None = read_manifest(store)
    except StoreError as error:
        manifest = None
        found.append(Damage(file=MANIFEST_NAME, problem=str(error)))
    index = None
    if manifest is not None:
        found += _check_named(store, manifest, deep)
        index = _read_index(store, manifest, found)
    check = ShardCheck(store, manifest, index, deep)
    shards = _expected_shards(store, index)
    for bucket_id, shard_id in shards:
        found += check.check(bucket_id, shard_id)
    if manifest is not None:
        found += _check_totals(manifest, index, check, any_damage=bool(found))
        found += _find_unnamed(store, manifest, shards)
    return sorted(found, key=lambda damage: (damage.file, damage.problem))


def _check_named(store: Path, manifest: StoreManifest, deep: bool) -> Iterator[Damage]:
    """Check every file that the manifest names."""
    for name, (size, checksum) in manifest.files.items():
        path = store / name
        if not path.is_file():
            yield Damage(file=name, problem="missing")
        elif path.stat().st_size != size:
            yield Damage(file=name, problem=f"has {path.stat().st_size} bytes, {size} were written")
        elif deep or size <= FAST_HASH_BYTES or name == INDEX_NAME:
            try:
                if checksum_of_file(path) != checksum:
                    yield Damage(file=name, problem="its bytes are not those that were written")
            except OSError as error:  # a bad sector, say
                yield Damage(file=name, problem=f"cannot be read: {error}")


def _read_index(store: Path, manifest: StoreManifest, found: list[Damage]) -> pl.DataFrame | None:
    if INDEX_NAME not in manifest.files:
        found.append(Damage(file=MANIFEST_NAME, problem=f"does not name {INDEX_NAME}"))
        return None
    if any(damage.file == INDEX_NAME for damage in found):
        return None
    try:
        index = read_index(store, manifest.files[INDEX_NAME])
    except StoreError as error:
        found.append(Damage(file=INDEX_NAME, problem=str(error)))
        return None
    if index_fingerprint(index) != manifest.index_fingerprint:
        found.append(Damage(file=INDEX_NAME, problem="its content is not the one whose fingerprint the manifest holds"))
    return index


def _expected_shards(store: Path, index: pl.DataFrame | None) -> list[tuple[int, int]]:
    """Shards of the index; if that is lost, those that have a commit record."""
    if index is None:
        return sorted(commit.committed_shards(store))
    return sorted(index.select("bucket_id", "shard_id").unique().iter_rows())


def _check_totals(
    manifest: StoreManifest, index: pl.DataFrame | None, check: ShardCheck, *, any_damage: bool
) -> Iterator[Damage]:
    if any_damage or index is None:  # totals over a damaged store only repeat what is known
        return
    totals = {
        "num_samples": (manifest.num_samples, len(index)),
        "num_tokens": (manifest.num_tokens, index["num_tokens"].sum()),
        "num_supervised_tokens": (manifest.num_supervised_tokens, index["num_supervised_tokens"].sum()),
        "num_bytes": (manifest.num_bytes, check.num_bytes),
    }
    for name, (written, counted) in totals.items():
        if written != counted:
            yield Damage(file=MANIFEST_NAME, problem=f"{name} is {written}, the store holds {counted}")


def _find_unnamed(store: Path, manifest: StoreManifest, shards: list[tuple[int, int]]) -> Iterator[Damage]:
    named = {MANIFEST_NAME, LOCK_NAME, *manifest.files}
    for bucket_id, shard_id in shards:
        named.add(commit.record_name(bucket_id, shard_id))
        named |= {spec.file_name(bucket_id, shard_id) for spec in shard_arrays(shape_of(manifest))}
    for path in files_below(store):
        name = path.relative_to(store).as_posix()
        if name not in named:
            yield Damage(file=name, problem="named by neither the manifest nor a commit record")
