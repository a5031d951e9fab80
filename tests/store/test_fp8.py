import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.store.bf16 import all_finite, from_bf16_bits, to_bf16_bits
from dflash_tools.store.fp8 import (
    E4M3_VALUES,
    decode_fp8,
    encode_fp8,
    measure_error,
    relative_errors,
    to_e4m3_bits,
)


def round_trip(values: np.ndarray) -> np.ndarray:
    states = to_bf16_bits(values.astype(np.float32))
    bits, scales = encode_fp8(states)
    out = np.empty_like(states)
    decode_fp8(bits, scales, out)
    assert all_finite(out)
    return from_bf16_bits(out)


def test_every_code_has_the_value_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(E4M3_VALUES, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=50))
def test_rounding_agrees_with_ml_dtypes(values):
    array = np.array(values, dtype=np.float32)
    assert np.array_equal(to_e4m3_bits(array), array.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_values_beyond_the_range_saturate():
    assert E4M3_VALUES[to_e4m3_bits(np.array([1e9, -1e9], dtype=np.float32))].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("hidden_size", [32, 64, 100, 576])
def test_normal_values_lose_about_two_percent(hidden_size):
    values = np.random.default_rng(0).standard_normal((50, 3, hidden_size)).astype(np.float32)
    error = np.linalg.norm(round_trip(values) - values) / np.linalg.norm(values)
    assert 0.015 < error < 0.03


def test_an_attention_sink_token_keeps_its_small_values():
    """int8 with one scale per token loses everything but the largest channels here."""
    values = np.random.default_rng(0).standard_normal((4, 2, 576)).astype(np.float32)
    values[0, :, 5] = 25_472.0
    decoded = round_trip(values)
    others = np.ones(576, dtype=bool)
    others[:64] = False  # the group of the large value
    error = np.linalg.norm((decoded - values)[0][:, others]) / np.linalg.norm(values[0][:, others])
    assert error < 0.03
    assert decoded[0, 0, 5] == pytest.approx(25_472.0, rel=0.005)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-30, 2.9e38])
def test_extreme_groups_stay_finite(largest):
    values = np.zeros((2, 1, 64), dtype=np.float32)
    values[0, 0, 0] = largest
    values[0, 0, 1] = -largest
    decoded = round_trip(values)
    assert np.allclose(decoded, values, rtol=0.01, atol=1e-36)


def test_decoding_is_the_rounded_product_for_every_code():
    generator = np.random.default_rng(0)
    codes = np.resize(np.delete(np.arange(256, dtype=np.uint8), [127, 255]), (300, 2, 100))
    scales = to_bf16_bits(generator.lognormal(0, 20, (300, 2, 2)).astype(np.float32))
    out = np.empty(codes.shape, dtype=np.uint16)
    decode_fp8(codes, scales, out)
    factors = np.repeat(from_bf16_bits(scales), 64, axis=-1)[..., :100]
    assert np.array_equal(out, to_bf16_bits(E4M3_VALUES[codes] * factors))


def test_a_thread_that_flushes_subnormals_reads_the_same_values():
    import torch

    codes = np.resize(np.arange(127, dtype=np.uint8), (4, 1, 64))
    scales = to_bf16_bits(np.ones((4, 1, 1), dtype=np.float32))
    found = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        out = np.empty(codes.shape, dtype=np.uint16)
        decode_fp8(codes, scales, out)
        found.append(out)
    torch.set_flush_denormal(False)
    assert np.array_equal(*found)


def test_values_at_the_end_of_the_range_saturate_and_stay_finite():
    decoded = round_trip(np.full((1, 1, 64), 3.38e38))
    assert np.allclose(decoded, 2.977e38, rtol=0.01)


def test_zero_stays_zero_beside_large_values():
    values = np.zeros((1, 1, 64), dtype=np.float32)
    values[0, 0, 3] = 1000.0
    decoded = round_trip(values)
    assert np.count_nonzero(decoded) == 1


def test_the_error_is_kept_by_layer_and_for_first_tokens():
    generator = np.random.default_rng(0)
    samples = [to_bf16_bits(generator.standard_normal((n, 2, 64)).astype(np.float32)) for n in (5, 9)]
    for sample in samples:
        sample[:, 1] = 0  # a layer without loss
    encoded = [encode_fp8(sample) for sample in samples]
    error, first = relative_errors([measure_error([s], [e]) for s, e in zip(samples, encoded, strict=True)])
    assert 0.01 < error[0] < 0.03
    assert 0.01 < first[0] < 0.03
    assert error[1] == first[1] == 0.0
