"""Commit records: one sealed file per finished shard says which files it has; what no record names is not there."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_tools.errors import StoreError
from dflash_tools.store import sealed
from dflash_tools.store.files import write_file

RECORDS_FOLDER = "shards"
RECORD_SCHEMA_VERSION = 1


class StoredSample(BaseModel):
    """A sample of a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str
    start: int  # on the bucket's token axis
    num_tokens: int


class Fp8Error(BaseModel):
    """What fp8 lost, as sums over squares, so that shards add up. One entry per captured layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    squared_error: tuple[float, ...]
    squared_norm: tuple[float, ...]
    first_squared_error: tuple[float, ...]  # first tokens of samples only
    first_squared_norm: tuple[float, ...]


class CommitRecord(BaseModel):
    """A finished shard: its samples, its files and what was special about making it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = RECORD_SCHEMA_VERSION
    bucket_id: int
    shard_id: int
    chunk_tokens: int
    shard_tokens: int
    samples: tuple[StoredSample, ...]
    # Relative to the store -> size, checksum: SHA-256 of token ids and mask; of states, SHA-256 over the CRCs of
    # the chunks and the index, which costs nothing while writing and is checked at the speed of the disk.
    files: dict[str, tuple[int, str]]
    split_forward_ids: tuple[int, ...] = ()  # forward batches that were cut for lack of memory
    fp8_error: Fp8Error | None = None
    checksum: str = ""  # SHA-256 of this document with the field blank


def record_name(bucket_id: int, shard_id: int) -> str:
    """File of a commit record, relative to the store."""
    return f"{RECORDS_FOLDER}/{bucket_id}-{shard_id}.json"


def write_record(store: Path, record: CommitRecord) -> None:
    """Commit a shard: its files must be on disk already."""
    content = sealed.seal(record.model_dump_json(indent=2))
    write_file(store / record_name(record.bucket_id, record.shard_id), [content])


def read_record(store: Path, bucket_id: int, shard_id: int) -> CommitRecord | None:
    """Read the commit record of a shard; None if the shard was not committed.

    Raises:
        StoreError: If the record is damaged.
    """
    path = store / record_name(bucket_id, shard_id)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse_record(content, path)


def parse_record(content: bytes, path: Path) -> CommitRecord:
    """Check and read the bytes of a commit record.

    Raises:
        StoreError: If they are damaged or of another version.
    """
    fault = sealed.find_fault(content)
    if fault is not None:
        raise StoreError(f"{path}: commit record {fault}. Run extract with --repair to make the shard again")
    try:
        record = CommitRecord.model_validate_json(content)
    except ValidationError as error:
        raise StoreError(f"{path}: not a commit record of this version: {error}. Extract again") from None
    if path.name != Path(record_name(record.bucket_id, record.shard_id)).name:
        raise StoreError(
            f"{path}: holds the record of bucket {record.bucket_id}, shard {record.shard_id}. "
            "Run extract with --repair to make the shard again"
        )
    return record


def committed_shards(store: Path) -> set[tuple[int, int]]:
    """(bucket_id, shard_id) of every shard that has a commit record."""
    shards = set()
    for path in (store / RECORDS_FOLDER).glob("*-*.json"):
        bucket_id, _, shard_id = path.stem.partition("-")
        if bucket_id.isdigit() and shard_id.isdigit():
            shards.add((int(bucket_id), int(shard_id)))
    return shards
