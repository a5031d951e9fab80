"""The arrays of a bucket and their Zarr v3 metadata, written here so that every byte is ours to promise."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_tools.contracts.manifest import (
    STORE_FORMAT,
    STORE_SCHEMA_VERSION,
    BucketLayout,
    Codec,
    HiddenStatesDtype,
    StoreManifest,
)

SCALE_GROUP = 64  # values that share an fp8 scale
BLOSC_BLOCK_BYTES = 1 << 20  # the default block size loses a third of the gain: each byte plane needs its own table
CRC_BYTES = 4
METADATA_NAME = "zarr.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """What the arrays of a store look like, apart from the lengths of its buckets."""

    num_layers: int
    hidden_size: int
    hidden_states_dtype: HiddenStatesDtype = "bfloat16"
    codec: Codec = "none"
    last_hidden_state: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the cached states of one token before compression."""
        return sum(spec.row_bytes for spec in state_arrays(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of a bucket. ``codec`` None = one plain chunk per shard; else inner chunks under that codec."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    dimension_names: tuple[str, ...]
    codec: Codec | None
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def file_name(self, bucket_id: int, shard_id: int) -> str:
        """File of one shard, relative to the store."""
        key = ".".join(["c", str(shard_id), *("0" for _ in self.row_shape)])
        return f"{bucket_folder(bucket_id)}/{self.name}/{key}"


INPUT_IDS = ArraySpec(name="input_ids", dtype="int32", row_shape=(), dimension_names=("token",), codec=None)
LOSS_MASK = ArraySpec(name="loss_mask", dtype="uint8", row_shape=(), dimension_names=("token",), codec=None)
TOKEN_ARRAYS = (INPUT_IDS, LOSS_MASK)


def shape_of(manifest: StoreManifest) -> StoreShape:
    """The shape that a manifest describes."""
    return StoreShape(
        num_layers=len(manifest.target_layer_ids),
        hidden_size=manifest.hidden_size,
        hidden_states_dtype=manifest.hidden_states_dtype,
        codec=manifest.codec,
        last_hidden_state=manifest.last_hidden_state is not None,
    )


def state_arrays(shape: StoreShape) -> tuple[ArraySpec, ...]:
    """The arrays that hold states: hidden_states, with hidden_scales for fp8, and last_hidden_state if kept."""
    width = (shape.num_layers, shape.hidden_size)
    names = ("token", "layer", "hidden")
    logical = (("logical_dtype", "bfloat16"),)
    specs = []
    if shape.hidden_states_dtype == "bfloat16":
        specs.append(_states("hidden_states", "uint16", width, names, shape.codec, logical))
    else:
        scaled = (("logical_dtype", "float8_e4m3fn"), ("scales", "hidden_scales"))
        groups = (shape.num_layers, -(-shape.hidden_size // SCALE_GROUP))
        specs.append(_states("hidden_states", "uint8", width, names, shape.codec, scaled))
        specs.append(
            _states("hidden_scales", "uint16", groups, ("token", "layer", "hidden_group"), shape.codec, logical)
        )
    if shape.last_hidden_state:
        specs.append(
            _states("last_hidden_state", "uint16", (shape.hidden_size,), ("token", "hidden"), shape.codec, logical)
        )
    return tuple(specs)


def shard_arrays(shape: StoreShape) -> tuple[ArraySpec, ...]:
    """All arrays of a bucket: each shard has one file of each."""
    return (*TOKEN_ARRAYS, *state_arrays(shape))


def bucket_folder(bucket_id: int) -> str:
    """Folder of a bucket, relative to the store."""
    return f"buckets/{bucket_id}"


def metadata_files(shape: StoreShape, buckets: tuple[BucketLayout, ...]) -> dict[str, bytes]:
    """Every zarr.json of a store: path relative to the store -> content."""
    root = {"format": STORE_FORMAT, "schema_version": STORE_SCHEMA_VERSION}
    files = {METADATA_NAME: _group(root), f"buckets/{METADATA_NAME}": _group({})}
    for bucket in buckets:
        folder = bucket_folder(bucket.bucket_id)
        attributes = {
            "min_tokens": bucket.min_tokens,
            "max_tokens": bucket.max_tokens,
            "num_samples": bucket.num_samples,
            "num_tokens": bucket.num_tokens,
            "logical_dtype": "bfloat16",
        }
        files[f"{folder}/{METADATA_NAME}"] = _group(attributes)
        for spec in shard_arrays(shape):
            files[f"{folder}/{spec.name}/{METADATA_NAME}"] = _array(spec, bucket)
    return files


def file_path(store: Path, spec: ArraySpec, bucket_id: int, shard_id: int) -> Path:
    """File of one shard of one array."""
    return store / spec.file_name(bucket_id, shard_id)


def _states(
    name: str,
    dtype: str,
    row_shape: tuple[int, ...],
    dimension_names: tuple[str, ...],
    codec: Codec,
    attributes: tuple[tuple[str, str], ...],
) -> ArraySpec:
    return ArraySpec(
        name=name,
        dtype=dtype,
        row_shape=row_shape,
        dimension_names=dimension_names,
        codec=codec,
        attributes=attributes,
    )


def _group(attributes: dict[str, Any]) -> bytes:
    return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def _array(spec: ArraySpec, bucket: BucketLayout) -> bytes:
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [bucket.axis_tokens, *spec.row_shape],
            "data_type": spec.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [bucket.shard_tokens, *spec.row_shape]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": _codecs(spec, bucket),
            "attributes": dict(spec.attributes),
            "dimension_names": list(spec.dimension_names),
        }
    )


def _codecs(spec: ArraySpec, bucket: BucketLayout) -> list[dict[str, Any]]:
    itemsize = np.dtype(spec.dtype).itemsize
    as_bytes = {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    crc = {"name": "crc32c"}
    if spec.codec is None:
        return [as_bytes, crc]
    inner: list[dict[str, Any]] = [as_bytes, crc]
    if spec.codec == "lossless":
        blosc = {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle",
            "typesize": itemsize,
            "blocksize": BLOSC_BLOCK_BYTES,
        }
        inner = [as_bytes, {"name": "blosc", "configuration": blosc}, crc]
    return [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [bucket.chunk_tokens, *spec.row_shape],
                "codecs": inner,
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, crc],
                "index_location": "end",
            },
        }
    ]


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
