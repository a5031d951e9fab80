"""Cutting text at paragraph ends."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data.text_split import split_text


@given(st.text(alphabet="ab .\n", max_size=300), st.integers(1, 40))
def test_pieces_are_short_enough_and_together_the_text(text, max_tokens):
    pieces = split_text(text, max_tokens, len)
    assert "".join(pieces) == text
    assert all(len(piece) <= max_tokens for piece in pieces)


def test_pieces_end_at_paragraph_ends_and_are_as_long_as_fits():
    text = "one one.\n\ntwo two.\n\nthree three.\n"
    assert split_text(text, 22, len) == ["one one.\n\ntwo two.\n\n", "three three.\n"]


def test_a_long_paragraph_is_cut_at_lines_then_sentences_then_words():
    assert split_text("aaaa\nbbbb\ncccc", 10, len) == ["aaaa\nbbbb\n", "cccc"]
    assert split_text("Aa bb. Cc dd. Ee", 8, len) == ["Aa bb. ", "Cc dd. ", "Ee"]
    assert split_text("aaa bbb ccc", 8, len) == ["aaa bbb ", "ccc"]
    assert split_text("a" * 10, 4, len) == ["aa", "aaa", "aa", "aaa"]


def test_text_that_grows_when_it_is_joined_is_cut_again():
    def count(text):
        return len(text) + 5 * text.count("b\na")

    assert all(count(piece) <= 10 for piece in split_text("aab\naab\naab\n", 10, count))
