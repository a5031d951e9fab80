"""Where JSON values end, however the bytes arrive."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data.json_scanner import DamagedFile, JsonScanner, find_value_end

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def blocks_of(data, sizes):
    at = 0
    for size in [*sizes, len(data)]:
        if block := data[at : at + size]:
            yield block
        at += size


@given(
    st.lists(json_values, max_size=6),
    st.lists(st.integers(1, 30), max_size=40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_the_values_of_a_stream_come_back_whatever_its_blocks(values, sizes, indent, ensure_ascii):
    data = "\n".join(json.dumps(value, indent=indent, ensure_ascii=ensure_ascii) for value in values).encode()
    scanner = JsonScanner(blocks_of(data, sizes))
    found = []
    while scanner.next_byte():
        line, raw = scanner.take()
        assert data.split(b"\n")[line - 1].lstrip()[:1] == raw[:1]
        found.append(json.loads(raw))
    assert found == values


@given(json_values, st.data())
def test_a_value_that_is_cut_has_no_end_before_the_cut(value, data):
    text = json.dumps([value]).encode()
    cut = data.draw(st.integers(1, len(text) - 1))
    assert find_value_end(text[:cut], 0, is_last=True) is None
    assert find_value_end(text, 0, is_last=True) == len(text)


def test_a_stray_bracket_is_a_value_so_that_the_scan_goes_on():
    scanner = JsonScanner(iter([b"}{}"]))
    scanner.next_byte()
    assert scanner.take() == (1, b"}")
    scanner.next_byte()
    assert scanner.take() == (1, b"{}")


def test_a_value_without_end_stops_at_a_bound(monkeypatch):
    monkeypatch.setattr("dflash_tools.data.json_scanner.MAX_ROW_BYTES", 1000)
    scanner = JsonScanner(iter([b'["', *[b"x" * 100] * 50]))
    scanner.next_byte()
    with pytest.raises(DamagedFile, match="begins here"):
        scanner.take()
