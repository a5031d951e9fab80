"""Cutting text at paragraph ends."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data.encode import TextEncoder
from dflash_tools.data.text_split import split_text


def split(text, max_tokens):
    """Every character is a token."""
    return list(split_text(text, max_tokens, lambda piece: max_tokens if len(piece) > max_tokens else None))


@given(st.text(alphabet="ab .\n", max_size=300), st.integers(1, 40))
def test_pieces_are_short_enough_and_together_the_text(text, max_tokens):
    pieces = split(text, max_tokens)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_tokens for piece in pieces)


def test_pieces_end_at_paragraph_ends_and_are_as_long_as_fits():
    text = "one one.\n\ntwo two.\n\nthree three.\n"
    assert split(text, 22) == ["one one.\n\ntwo two.\n\n", "three three.\n"]


def test_a_long_paragraph_is_cut_at_lines_then_sentences_then_words():
    assert split("aaaa\nbbbb\ncccc", 10) == ["aaaa\nbbbb\n", "cccc"]
    assert split("Aa bb. Cc dd. Ee", 8) == ["Aa bb. ", "Cc dd. ", "Ee"]
    assert split("aaa bbb ccc", 8) == ["aaa bbb ", "ccc"]
    assert split("a" * 10, 4) == ["aaaa", "aaaa", "aa"]


def test_a_heading_stays_with_the_long_paragraph_below_it():
    assert split("Head\n\naaaa bbbb cccc dddd eeee", 20) == ["Head\n\naaaa bbbb ", "cccc dddd eeee"]


def test_a_piece_that_has_more_tokens_alone_ends_earlier():
    def reach(piece):
        tokens = len(piece) + 3 * piece.endswith("b\n")
        return 10 if tokens > 10 else None

    pieces = list(split_text("aab\naab\naab\n", 10, reach))
    assert "".join(pieces) == "aab\naab\naab\n"
    assert all(reach(piece) is None for piece in pieces)


@given(st.text(alphabet="the fox\u00e9\U0001f600\ufdd0", min_size=1, max_size=120), st.integers(4, 20))
def test_the_reach_of_some_tokens_is_where_the_next_token_begins(tokenizer, text, max_tokens):
    encoder = TextEncoder(tokenizer.backend_tokenizer, 4096)
    reach = encoder.reach(text, max_tokens)
    whole = encoder._tokenizer.encode_batch(text.split("\ufdd0"), add_special_tokens=False)
    num_tokens = sum(len(encoding.ids) for encoding in whole)
    assert (reach is None) == (num_tokens <= max_tokens)
    if reach is not None:
        assert reach <= len(text)
        assert encoder.reach(text[:reach], max_tokens) is None
