"""Have these token ids and this mask been seen before? In 8 bytes a row, for tens of millions of rows."""

import numpy as np
from numpy.typing import NDArray

_FRESH_KEYS = 1 << 16


class SeenKeys:
    """A set of 64-bit keys: a small hash set in front of one sorted array, which takes 8 bytes a key."""

    def __init__(self) -> None:
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._fresh: set[int] = set()

    def add(self, key: int) -> bool:
        """Add a key; tell whether it was there."""
        if key in self._fresh or self._is_sorted(key):
            return True
        self._fresh.add(key)
        if len(self._fresh) >= _FRESH_KEYS:
            fresh = np.fromiter(self._fresh, np.uint64, len(self._fresh))
            self._sorted = np.sort(np.concatenate([self._sorted, fresh]), kind="stable")
            self._fresh.clear()
        return False

    def _is_sorted(self, key: int) -> bool:
        if not len(self._sorted):
            return False
        wanted = np.uint64(key)
        at = int(np.searchsorted(self._sorted, wanted))
        return at < len(self._sorted) and bool(self._sorted[at] == wanted)
