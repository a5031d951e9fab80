"""Loss masks of a speculators cache: they lie in the dataset beside the states, a folder of Arrow files."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.convert.cache_file import SAFETENSORS, FileFault
from dflash_tools.errors import DataError

STATE_NAME = "state.json"
NO_MASK = "no_mask"
MASK_MISMATCH = "mask_mismatch"
_COLUMNS = ("input_ids", "loss_mask")


def find_dataset(source: Path) -> Path | None:
    """The dataset that a cache lies in: SOURCE itself or the folder above; None if neither is one."""
    return next((folder for folder in (source, source.parent) if (folder / STATE_NAME).is_file()), None)


class ArrowMasks:
    """Rows of a dataset that was saved with ``save_to_disk``, mapped, not read into memory."""

    def __init__(self, folder: Path) -> None:
        """Open a dataset.

        Raises:
            DataError: If the folder holds none, or it lacks a column.
        """
        import pyarrow as pa

        try:
            state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
            paths = [folder / entry["filename"] for entry in state["_data_files"]]
            tables = [_read_table(path) for path in paths]
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
            raise DataError(f"{folder}: no dataset of save_to_disk can be read ({error!r}); check --masks") from None
        table = pa.concat_tables(tables)
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise DataError(f"{folder}: has no column {missing[0]}, only {table.column_names}; check --masks")
        self._ids, self._masks = (table[name] for name in _COLUMNS)
        self.fingerprint = fingerprint_of_json([[path.name, path.stat().st_size] for path in paths])

    def __len__(self) -> int:
        return len(self._masks)

    def mask_of(self, file_name: str, input_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The mask that belongs to a file, whose name ends in the number of its row, e.g. ``hs_17.safetensors``.

        Raises:
            FileFault: If there is no such row, or it has other ids than the file.
        """
        number = re.search(rf"(\d+){re.escape(SAFETENSORS)}", Path(file_name).name)
        if number is None or int(number.group(1)) >= len(self):
            raise FileFault(NO_MASK, f"its name gives none of the {len(self)} rows of the dataset")
        row = int(number.group(1))
        if not np.array_equal(self._ids[row].values.to_numpy(zero_copy_only=False), input_ids):
            raise FileFault(MASK_MISMATCH, f"its ids are not those of row {row} of the dataset")
        values = self._masks[row].values.to_numpy(zero_copy_only=False)
        if len(values) != len(input_ids):
            raise FileFault(MASK_MISMATCH, f"the mask of row {row} has {len(values)} tokens, the ids {len(input_ids)}")
        return np.asarray(values != 0, dtype=np.uint8)


def _read_table(path: Path) -> Any:
    import pyarrow as pa

    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    return table.select([name for name in _COLUMNS if name in table.column_names])
