"""The general path: any array of a store through the zarr library, straight into a buffer."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.buffer.cpu import NDBuffer

from dflash_tools.store import commit
from dflash_tools.store.arrays import ArraySpec, bucket_folder
from dflash_tools.store.direct import ReadFault


class ZarrReader:
    """Reads rows with zarr; slower than ``DirectReader``, and the same bytes."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._group = zarr.open_group(store, mode="r")
        self._arrays: dict[tuple[int, str], Any] = {}
        self._present: set[str] = set()
        self._lock = threading.Lock()

    def read(self, spec: ArraySpec, bucket_id: int, shard_id: int, start: int, out: NDArray[Any]) -> None:
        """As ``DirectReader.read``."""
        self._check_present(spec, bucket_id, shard_id)
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

    def _check_present(self, spec: ArraySpec, bucket_id: int, shard_id: int) -> None:
        """Refuse a missing shard, which zarr would read as zeros."""
        name = spec.file_name(bucket_id, shard_id)
        if name in self._present:
            return
        record = commit.read_record(self._store, bucket_id, shard_id)
        if record is None:
            raise ReadFault(f"commit record {commit.record_name(bucket_id, shard_id)} is missing")
        path = self._store / name
        if not path.is_file():
            raise ReadFault(f"file {path.name} of {path.parent.name} is missing")
        if path.stat().st_size != record.files[name][0]:
            raise ReadFault(f"file {path.name} has {path.stat().st_size} bytes, not {record.files[name][0]}")
        self._present.add(name)
