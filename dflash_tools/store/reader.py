"""Opening a finished store and reading samples from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.store.arrays import INPUT_IDS, LOSS_MASK, ArraySpec, shape_of, state_arrays
from dflash_tools.store.direct import DirectReader, ReadFault
from dflash_tools.store.fp8 import decode_fp8
from dflash_tools.store.index import INDEX_NAME, read_index
from dflash_tools.store.manifest_file import read_manifest


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """One sample as it was stored.

    Attributes:
        hidden_states: bfloat16 bits. Shape: (num_tokens, layer, hidden), layers in the order of target_layer_ids.
        input_ids: Shape: (num_tokens,).
        loss_mask: 1 = the token is supervised. Shape: (num_tokens,).
        last_hidden_state: bfloat16 bits, if the store keeps them. Shape: (num_tokens, hidden).
    """

    hidden_states: NDArray[np.uint16]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    last_hidden_state: NDArray[np.uint16] | None = None


class ArrayReader(Protocol):
    """Brings rows of one array into a buffer; raises ReadFault if they are not there as written."""

    def read(self, spec: ArraySpec, bucket_id: int, shard_id: int, start: int, out: NDArray[Any]) -> None:
        """Fill ``out``, C-contiguous, shape (num_tokens, *row_shape), from row ``start`` of the bucket's axis."""


class Store:
    """A finished store. Threads may share it; it goes on working after a fork and can be pickled.

    Attributes:
        path: The store's folder.
        manifest: Its identity card.
        index: One row per sample; the position is the sample row.
    """

    def __init__(self, path: Path, manifest: StoreManifest, index: pl.DataFrame, reader: ArrayReader) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self._reader = reader
        shape = shape_of(manifest)
        self._specs = {spec.name: spec for spec in state_arrays(shape)}
        self._row_shape = (shape.num_layers, shape.hidden_size)
        self._bucket_ids = index["bucket_id"].to_numpy()
        self._shard_ids = index["shard_id"].to_numpy()
        self._starts = index["start"].to_numpy()
        self._num_tokens = index["num_tokens"].to_numpy()

    def __len__(self) -> int:
        return len(self._num_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.path,)

    def read(self, rows: Sequence[int] | NDArray[np.int64]) -> list[Sample]:
        """Read whole samples.

        Args:
            rows: Sample rows, in any order.

        Raises:
            IndexError: If a row is not in the index.
            StoreError: If anything of a sample is missing or damaged; never zeros instead.
        """
        return [self._read_sample(int(row)) for row in rows]

    def read_into(self, row: int, out: NDArray[np.uint16]) -> None:
        """Read the hidden states of one sample straight into a caller's buffer.

        Args:
            row: Sample row.
            out: C-contiguous; gets bfloat16 bits. Shape: (num_tokens, layer, hidden).

        Raises:
            IndexError: If the row is not in the index.
            ValueError: If the buffer does not fit.
            StoreError: As for ``read``.
        """
        self._check_row(row)
        expected = (int(self._num_tokens[row]), *self._row_shape)
        if out.shape != expected or out.dtype != np.uint16 or not out.flags.c_contiguous:
            raise ValueError(
                f"row {row} needs a C-contiguous uint16 buffer of shape {expected}, got {out.dtype} {out.shape}"
            )
        spec = self._specs["hidden_states"]
        if self.manifest.hidden_states_dtype == "bfloat16":
            self._fill(spec, row, out)
            return
        bits = self._fetch(spec, row)
        decode_fp8(bits, self._fetch(self._specs["hidden_scales"], row), out)

    def read_last_hidden_state(self, row: int, out: NDArray[np.uint16]) -> None:
        """Read the last hidden state of one sample into a buffer of shape (num_tokens, hidden), bfloat16 bits.

        Raises:
            StoreError: If the store does not keep it, and as for ``read``.
        """
        self._check_row(row)
        if "last_hidden_state" not in self._specs:
            raise StoreError(
                f"{self.path}: keeps no last hidden state; extract again with target.store_last_hidden_state = true"
            )
        self._fill(self._specs["last_hidden_state"], row, out)

    def read_tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Read token ids and loss mask of one sample without touching its states. Shapes: (num_tokens,)."""
        self._check_row(row)
        return self._fetch(INPUT_IDS, row), self._fetch(LOSS_MASK, row)

    def _read_sample(self, row: int) -> Sample:
        input_ids, loss_mask = self.read_tokens(row)
        hidden_states = np.empty((len(input_ids), *self._row_shape), dtype=np.uint16)
        self.read_into(row, hidden_states)
        last = self._specs.get("last_hidden_state")
        return Sample(
            hidden_states=hidden_states,
            input_ids=input_ids,
            loss_mask=loss_mask,
            last_hidden_state=None if last is None else self._fetch(last, row),
        )

    def _fetch(self, spec: ArraySpec, row: int) -> NDArray[Any]:
        out = np.empty((int(self._num_tokens[row]), *spec.row_shape), dtype=spec.dtype)
        self._fill(spec, row, out)
        return out

    def _fill(self, spec: ArraySpec, row: int, out: NDArray[Any]) -> None:
        bucket_id, shard_id = int(self._bucket_ids[row]), int(self._shard_ids[row])
        try:
            self._reader.read(spec, bucket_id, shard_id, int(self._starts[row]), out)
        except ReadFault as fault:
            raise StoreError(
                f"{self.path}: bucket {bucket_id}, shard {shard_id}, sample {self.index['sample_id'][row]} "
                f"(row {row}): {fault}. Run: dflash-tools verify {self.path} --deep; extract --repair makes "
                "damaged shards again"
            ) from None

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in the index of {self.path}, which has {len(self)} samples")


def open_store(path: str | Path, *, reader: Literal["direct", "zarr"] = "direct") -> Store:
    """Open a finished store; costs the manifest and the index, whatever the number of bytes.

    Args:
        path: The store's folder.
        reader: "direct" maps the files; "zarr" goes through the zarr library. Both give the same bytes.

    Raises:
        StoreError: If there is no store, it is unfinished, of another version, or manifest or index are damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    index = read_index(folder, manifest.files.get(INDEX_NAME))
    if reader == "direct":
        return Store(folder, manifest, index, DirectReader(folder, manifest.buckets))
    from dflash_tools.store.zarr_reader import ZarrReader  # zarr loads only here

    return Store(folder, manifest, index, ZarrReader(folder, manifest.buckets))
