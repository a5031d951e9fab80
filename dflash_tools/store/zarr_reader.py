"""The general path: any array of a store through the zarr library, straight into a buffer."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.buffer.cpu import NDBuffer

from dflash_tools.contracts.manifest import BucketLayout
from dflash_tools.store import commit
from dflash_tools.store.arrays import CRC_BYTES, ArraySpec, bucket_folder
from dflash_tools.store.direct import ReadFault, map_file
from dflash_tools.store.shard import INDEX_ENTRY_BYTES, MISSING, decode_index


class ZarrReader:
    """Reads rows with zarr; slower than ``DirectReader``, and the same bytes."""

    def __init__(self, store: Path, buckets: tuple[BucketLayout, ...]) -> None:
        self._store = store
        self._buckets = buckets
        self._group = zarr.open_group(store, mode="r")
        self._arrays: dict[tuple[int, str], Any] = {}
        self._present: dict[str, NDArray[np.bool_]] = {}
        self._lock = threading.Lock()

    def read(self, spec: ArraySpec, bucket_id: int, shard_id: int, start: int, out: NDArray[Any]) -> None:
        """As ``DirectReader.read``."""
        bucket = self._buckets[bucket_id]
        first = start - shard_id * bucket.shard_tokens
        chunks = slice(first // bucket.chunk_tokens, -(-(first + len(out)) // bucket.chunk_tokens))
        present = self._chunks_present(spec, bucket_id, shard_id)
        if spec.codec is not None and not present[chunks].all():
            raise ReadFault(f"chunk {chunks.start + int(np.argmin(present[chunks]))} was never written")
        rows = slice(start, start + len(out))
        try:
            self._array(spec, bucket_id).get_basic_selection((rows, ...), out=NDBuffer.from_numpy_array(out))
        except (ValueError, RuntimeError, OSError) as error:
            raise ReadFault(f"zarr cannot read {spec.name}: {error}") from error

    def _array(self, spec: ArraySpec, bucket_id: int) -> Any:
        with self._lock:
            key = (bucket_id, spec.name)
            if key not in self._arrays:
                array = self._group[f"{bucket_folder(bucket_id)}/{spec.name}"]
                if np.dtype(array.dtype) != np.dtype(spec.dtype):  # type: ignore[union-attr]
                    raise ReadFault(f"array {spec.name} is {array.dtype}, not {spec.dtype}")  # type: ignore[union-attr]
                self._arrays[key] = array
            return self._arrays[key]

    def _chunks_present(self, spec: ArraySpec, bucket_id: int, shard_id: int) -> NDArray[np.bool_]:
        """Which chunks of a shard were written; zarr would read the others, or a missing shard, as zeros."""
        name = spec.file_name(bucket_id, shard_id)
        if name in self._present:
            return self._present[name]
        record = commit.read_record(self._store, bucket_id, shard_id)
        if record is None:
            raise ReadFault(f"commit record {commit.record_name(bucket_id, shard_id)} is missing")
        data = map_file(self._store / name, record.files[name][0])
        present = np.ones(1, dtype=np.bool_)
        if spec.codec is not None:
            bucket = self._buckets[bucket_id]
            index = decode_index(data[-(bucket.shard_tokens // bucket.chunk_tokens * INDEX_ENTRY_BYTES + CRC_BYTES) :])
            if index is None:
                raise ReadFault(f"the shard index of {name} fails its checksum")
            present = index[:, 0] != MISSING
        return self._present.setdefault(name, present)
