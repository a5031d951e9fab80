"""A set of 64-bit keys that behaves as a set does."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data import duplicates
from dflash_tools.data.duplicates import SeenKeys


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20), max_size=200))
def test_it_says_what_a_set_would_say(keys):
    fresh, duplicates._FRESH_KEYS = duplicates._FRESH_KEYS, 7
    try:
        seen, plain = SeenKeys(), set()
        for key in keys:
            assert seen.add(key) == (key in plain)
            plain.add(key)
    finally:
        duplicates._FRESH_KEYS = fresh
