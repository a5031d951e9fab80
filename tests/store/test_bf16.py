import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.store.bf16 import all_finite, from_bf16_bits, to_bf16_bits


def test_values_that_bfloat16_can_hold_come_back_unchanged():
    values = np.array([0.0, -1.5, 3.140625], dtype=np.float32)
    assert np.array_equal(from_bf16_bits(to_bf16_bits(values)), values)


def test_a_tie_rounds_to_even():
    halfway = np.array([1.00390625], dtype=np.float32)  # midway between 1.0 and 1.0078125
    assert from_bf16_bits(to_bf16_bits(halfway))[0] == 1.0


def test_every_bit_pattern_survives_the_way_to_float32_and_back():
    """ST-01: NaN payloads, -0.0, subnormals and 3e38 included; only signalling NaNs become quiet."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    is_nan = (bits & 0x7FFF) > 0x7F80
    assert np.array_equal(to_bf16_bits(from_bf16_bits(bits)), np.where(is_nan, bits | 0x40, bits))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_rounding_agrees_with_ml_dtypes(patterns):
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = from_bf16_bits(to_bf16_bits(values))
    assert np.array_equal(found, expected, equal_nan=True)


def test_infinity_and_nan_are_found_anywhere():
    bits = np.zeros((700, 3, 400), dtype=np.uint16)
    assert all_finite(bits)
    for value in (np.inf, -np.inf, np.nan):
        bits[-1, -1, -1] = to_bf16_bits(np.array([value], dtype=np.float32))[0]
        assert not all_finite(bits)


def test_the_largest_finite_value_is_finite():
    assert all_finite(to_bf16_bits(np.array([3.38e38, -3.38e38, 1e-40], dtype=np.float32)))
