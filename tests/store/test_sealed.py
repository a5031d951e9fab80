import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.store import sealed

TEXT = json.dumps({"name": "a store", "bytes": [1, 2, 3], "checksum": ""}, indent=2)


def test_a_sealed_document_is_whole_and_is_still_json():
    content = sealed.seal(TEXT)
    assert sealed.find_fault(content) is None
    assert len(json.loads(content)["checksum"]) == 64


def test_every_flipped_bit_is_found():
    content = sealed.seal(TEXT)
    for position in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        assert sealed.find_fault(bytes(damaged)) is not None


@given(st.integers(0, len(sealed.seal(TEXT)) - 1))
def test_every_truncation_is_found(length):
    """ST-14."""
    assert "truncated" in sealed.find_fault(sealed.seal(TEXT)[:length])


def test_bytes_after_the_end_are_found():
    assert sealed.find_fault(sealed.seal(TEXT) + b"\n") is not None


def test_the_checksum_must_be_the_last_field():
    with pytest.raises(ValueError, match="empty checksum"):
        sealed.seal('{\n  "checksum": "",\n  "name": 1\n}')
