"""Cutting long plain text at the ends of paragraphs."""

import re
from collections.abc import Callable, Iterator

# The coarsest border that makes pieces short enough is used: paragraphs, lines, sentences, words.
_BORDERS = tuple(re.compile(pattern) for pattern in (r"\n[ \t]*\n\s*", r"\n", r"(?<=[.!?;])\s+", r"\s+"))


def split_text(text: str, max_tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Cut a text into pieces of at most ``max_tokens``; together they are the text.

    Pieces end at paragraph ends. A paragraph that is too long by itself is cut at lines, then sentences, then words,
    and, where a text has no borders at all, between characters.

    Args:
        text: The text.
        max_tokens: Longest piece.
        count_tokens: Counts the tokens of a piece; any number above ``max_tokens`` will do for a longer one.
    """
    if count_tokens(text) <= max_tokens:
        return [text]
    return list(_pack(_units(text, 0, max_tokens, count_tokens), max_tokens, count_tokens))


def _units(text: str, level: int, max_tokens: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """Cut at one kind of border; what stays too long is cut at the next kind."""
    if level == len(_BORDERS):
        yield from _halves(text, max_tokens, count_tokens)
        return
    for unit in _cut_at(text, _BORDERS[level]):
        if count_tokens(unit) <= max_tokens:
            yield unit
        else:
            yield from _units(unit, level + 1, max_tokens, count_tokens)


def _cut_at(text: str, border: re.Pattern[str]) -> list[str]:
    ends = [*(match.end() for match in border.finditer(text)), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b]


def _halves(text: str, max_tokens: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    if len(text) == 1 or count_tokens(text) <= max_tokens:
        yield text
        return
    middle = len(text) // 2
    yield from _halves(text[:middle], max_tokens, count_tokens)
    yield from _halves(text[middle:], max_tokens, count_tokens)


def _pack(units: Iterator[str], max_tokens: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """Join neighbours as long as they fit."""
    held: list[str] = []
    num_tokens = 0
    for unit in units:
        unit_tokens = count_tokens(unit)
        if held and num_tokens + unit_tokens > max_tokens:
            yield from _checked(held, max_tokens, count_tokens)
            held, num_tokens = [], 0
        held.append(unit)
        num_tokens += unit_tokens
    if held:
        yield from _checked(held, max_tokens, count_tokens)


def _checked(units: list[str], max_tokens: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """Join units; in two pieces if, against all expectation, they have more tokens together than one by one."""
    piece = "".join(units)
    if len(units) == 1 or count_tokens(piece) <= max_tokens:
        yield piece
        return
    middle = len(units) // 2
    yield from _checked(units[:middle], max_tokens, count_tokens)
    yield from _checked(units[middle:], max_tokens, count_tokens)
