import pytest

from dflash_tools.report.format import format_value, heading


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("num_tokens", 1234567, "1,234,567"),
        ("share_of_tokens", 0.1234, "12.3 %"),
        ("padding_efficiency", 0.975, "97.5 %"),
        ("store_bytes", 999, "999 B"),
        ("store_bytes", 38_000_000_000_000, "38 TB"),
        ("data_wait_seconds", 0.0123, "12.3 ms"),
        ("data_wait_seconds", 90.0, "90 s"),
        ("data_wait_seconds", 7200.0, "2 h"),
        ("learning_rate", 6e-4, "6.00e-04"),
        ("loss", 3.14159, "3.142"),
        ("loss", float("nan"), "–"),
        ("loss", None, "–"),
        ("skipped", True, "yes"),
        ("strategy", "interleave", "interleave"),
        ("plan_fingerprint", "0123456789abcdef" * 4, "0123456789abcdef"),
    ],
)
def test_the_unit_in_a_name_decides_how_a_value_reads(column, value, text):
    assert format_value(column, value) == text


def test_a_heading_leaves_out_what_only_carries_the_unit():
    assert heading("num_padded_tokens") == "padded tokens"
    assert heading("data_wait_seconds") == "data wait"
