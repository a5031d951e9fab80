"""Token ids and loss masks of all samples on disk while their places are chosen; only numbers stay in memory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IDS_NAME = "input_ids.int32"
MASKS_NAME = "loss_mask.uint8"


class Spool:
    """Samples one after another in two flat files; written once, then read in any order."""

    def __init__(self, folder: Path) -> None:
        """Start an empty spool in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = {"<i4": folder / IDS_NAME, "u1": folder / MASKS_NAME}
        self._files = {dtype: path.open("wb") for dtype, path in self._paths.items()}
        self._offsets = np.zeros(1, dtype=np.int64)
        self._views: dict[str, NDArray[Any]] = {}

    def append(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> None:
        """Add one sample. Shapes: (num_tokens,)."""
        self._files["<i4"].write(np.ascontiguousarray(input_ids, dtype="<i4").data)
        self._files["u1"].write(np.ascontiguousarray(loss_mask, dtype="u1").data)

    def close(self, num_tokens: NDArray[np.int64]) -> None:
        """End writing; ``num_tokens`` are the lengths of the samples in the order of ``append``."""
        for file in self._files.values():
            file.close()
        self._offsets = np.concatenate([[0], np.cumsum(num_tokens, dtype=np.int64)])
        for dtype, path in self._paths.items():
            empty = path.stat().st_size == 0
            self._views[dtype] = np.empty(0, dtype=dtype) if empty else np.memmap(path, dtype=dtype, mode="r")

    def read(self, position: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of the sample appended at ``position``, from 0."""
        first, stop = int(self._offsets[position]), int(self._offsets[position + 1])
        return np.array(self._views["<i4"][first:stop]), np.array(self._views["u1"][first:stop])

    def remove(self) -> None:
        """Delete the files and their folder."""
        self._views.clear()
        for dtype, path in self._paths.items():
            self._files[dtype].close()
            path.unlink(missing_ok=True)
        folder = next(iter(self._paths.values())).parent
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
