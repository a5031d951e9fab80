"""fp8 states: e4m3 bits with one bfloat16 scale per 64 values.

e4m3 (the "fn" variant of the OCP 8-bit floating point specification): 1 sign, 4 exponent and 3 mantissa bits, bias 7,
largest value 448, no infinity, NaN = 0x7F and 0xFF.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tools.store.arrays import SCALE_GROUP
from dflash_tools.store.bf16 import from_bf16_bits, to_bf16_bits
from dflash_tools.store.commit import Fp8Error

MAX_E4M3 = 448.0
_MIN_SCALE = 2.0**-116  # keeps scale x smallest e4m3 (2^-9) a normal float
_MAX_SCALE = 2.0**119  # keeps scale x 448 finite in bfloat16; values beyond 2.9e38 saturate
_EXPONENT_SHIFT = np.float32(2.0**120)
_SIGN_EXPONENT_MANTISSA = np.int32(0x87F00000 - (1 << 32))


def _e4m3_values() -> NDArray[np.float32]:
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3_VALUES = _e4m3_values()  # value of each of the 256 codes


def to_e4m3_bits(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to e4m3, ties to even, saturating at 448.

    Args:
        values: Finite float32 values, any shape.
    """
    magnitude = np.minimum(np.abs(values), np.float32(MAX_E4M3))
    bits = magnitude.view(np.uint32)
    # Normal range (>= 2^-6): keep 3 of 23 mantissa bits and rebias the exponent from 127 to 7.
    rounded = (bits + (((bits >> 20) & 1) + np.uint32(0x7FFFF))) >> 20
    normal = rounded - np.uint32((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(512.0)).astype(np.uint32)
    codes = np.where(magnitude < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    signs = np.signbit(values).astype(np.uint8)
    return np.bitwise_or(codes, np.left_shift(signs, 7), dtype=np.uint8)


def encode_fp8(states: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Quantise states: the largest value of each group of 64 maps to the largest e4m3 value.

    Args:
        states: Finite bfloat16 bits. Shape: (num_tokens, layer, hidden).

    Returns:
        e4m3 bits of the same shape, and bfloat16 bits of the scales, shape (num_tokens, layer, ceil(hidden / 64)).
    """
    num_tokens, num_layers, hidden_size = states.shape
    num_groups = -(-hidden_size // SCALE_GROUP)
    bits = np.empty(states.shape, dtype=np.uint8)
    scales = np.empty((num_tokens, num_layers, num_groups), dtype=np.uint16)
    for token in _token_blocks(states.shape):
        values = from_bf16_bits(states[token])
        if hidden_size % SCALE_GROUP:
            values = np.pad(values, ((0, 0), (0, 0), (0, -hidden_size % SCALE_GROUP)))
        groups = values.reshape(*values.shape[:2], num_groups, SCALE_GROUP)
        largest = np.abs(groups).max(axis=-1)
        scale_bits = to_bf16_bits(
            np.clip(largest / np.float32(MAX_E4M3), np.float32(_MIN_SCALE), np.float32(_MAX_SCALE))
        )
        scaled = groups / from_bf16_bits(scale_bits)[..., None]
        bits[token] = to_e4m3_bits(scaled).reshape(*values.shape)[..., :hidden_size]
        scales[token] = scale_bits
    return bits, scales


def decode_fp8(bits: NDArray[np.uint8], scales: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
    """Turn e4m3 bits and scales back into bfloat16 bits.

    Args:
        bits: Shape: (num_tokens, layer, hidden).
        scales: bfloat16 bits. Shape: (num_tokens, layer, ceil(hidden / 64)).
        out: Filled with bfloat16 bits. Shape: (num_tokens, layer, hidden).
    """
    hidden_size, num_groups = bits.shape[-1], scales.shape[-1]
    for token in _token_blocks(bits.shape):
        codes = bits[token]
        if hidden_size % SCALE_GROUP:
            codes = np.pad(codes, ((0, 0), (0, 0), (0, -hidden_size % SCALE_GROUP)))
        values = _widen(codes)
        groups = values.reshape(*values.shape[:2], num_groups, SCALE_GROUP)
        groups *= from_bf16_bits(scales[token])[..., None]
        # To bfloat16, ties to even, in place; there is no NaN to look after.
        patterns = values.view(np.uint32)
        rounded = patterns >> 16
        rounded &= 1
        rounded += np.uint32(0x7FFF)
        rounded += patterns
        rounded >>= 16
        out[token] = rounded[..., :hidden_size]


def _widen(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of e4m3 codes that are not NaN; same shape."""
    if np.float32(2.0**-129) * _EXPONENT_SHIFT == 0:
        return E4M3_VALUES[codes]  # this thread takes subnormal floats for zero
    # Moved up by 20 bits, e4m3 is a float32 of 2^-120 the value: the exponents differ by their biases, 127 and 7.
    patterns = np.left_shift(codes.view(np.int8), 20, dtype=np.int32, casting="unsafe")
    patterns &= _SIGN_EXPONENT_MANTISSA
    values = patterns.view(np.float32)
    values *= _EXPONENT_SHIFT
    return values


def measure_error(
    states: Sequence[NDArray[np.uint16]], encoded: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint16]]]
) -> Fp8Error:
    """Sum what fp8 lost, per captured layer, over all tokens and over first tokens alone.

    First tokens are apart because they are attention sinks with values of thousands: an average hides their loss.
    """
    sums = np.zeros((4, states[0].shape[1]), dtype=np.float64)
    for sample, (bits, scales) in zip(states, encoded, strict=True):
        decoded = np.empty_like(sample)
        decode_fp8(bits, scales, decoded)
        for token in _token_blocks(sample.shape):
            wanted = from_bf16_bits(sample[token]).astype(np.float64)
            error = from_bf16_bits(decoded[token]) - wanted
            parts = np.stack([np.square(error).sum(axis=-1), np.square(wanted).sum(axis=-1)])
            sums[:2] += parts.sum(axis=1)
            if token.start == 0:
                sums[2:] += parts[:, 0]
    rows = [tuple(row) for row in sums.tolist()]
    return Fp8Error(
        squared_error=rows[0], squared_norm=rows[1], first_squared_error=rows[2], first_squared_norm=rows[3]
    )


def relative_errors(shards: Sequence[Fp8Error]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Relative L2 error of each captured layer, over all tokens and over first tokens; 6 significant digits."""
    sums = np.array([[e.squared_error, e.squared_norm, e.first_squared_error, e.first_squared_norm] for e in shards])
    error, norm, first_error, first_norm = sums.sum(axis=0)
    return _root_of_ratio(error, norm), _root_of_ratio(first_error, first_norm)


def _root_of_ratio(error: NDArray[np.float64], norm: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in np.sqrt(error / np.where(norm > 0, norm, 1.0)))


def _token_blocks(shape: tuple[int, ...]) -> list[slice]:
    # About 256 thousand values at a time, so that float32 temporaries stay in the cache.
    step = max(1, (1 << 18) // max(1, shape[1] * shape[2]))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
