"""bfloat16 as bit patterns: NumPy and Zarr have no such dtype, so a store keeps uint16 bits."""

import numpy as np
from numpy.typing import NDArray

POSITIVE_INFINITY = 0x7F80  # from here on infinity and NaNs
NEGATIVE_INFINITY = 0xFF80
_BLOCK = 1 << 18  # values looked at together, so that the second look finds them in the cache


def to_bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to bfloat16, ties to even; a NaN stays a NaN and keeps its sign.

    Args:
        values: Any shape.

    Returns:
        Bit patterns of the same shape.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # Rounding could carry a NaN into infinity; truncate it and set the quiet bit instead.
    return (np.where(is_nan, bits | np.uint32(0x00400000), rounded) >> 16).astype(np.uint16).reshape(np.shape(values))


def from_bf16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bfloat16 bit patterns to float32; exact. Same shape."""
    return (np.asarray(bits, dtype=np.uint32) << 16).view(np.float32)


def all_finite(bits: NDArray[np.uint16]) -> bool:
    """Tell whether no value is infinite or NaN."""
    flat = bits.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        # The largest as signed shows positive ones, the largest as unsigned shows negative ones.
        if block.view(np.int16).max() >= POSITIVE_INFINITY or block.max() >= NEGATIVE_INFINITY:
            return False
    return True
