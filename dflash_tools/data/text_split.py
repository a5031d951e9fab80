"""Cutting long plain text at the ends of paragraphs."""

import re
from collections.abc import Callable, Iterator

# Where a piece may end, best first: after a paragraph, a line, a sentence, a word.
_BORDERS = tuple(re.compile(pattern) for pattern in (r"\n[ \t]*\n\s*", r"\n", r"(?<=[.!?;])\s+", r"\s+"))
# No more characters than this for one token are looked at: a text of any length is cut in linear time.
_MAX_CHARACTERS_PER_TOKEN = 64


def split_text(text: str, max_tokens: int, reach: Callable[[str], int | None]) -> Iterator[str]:
    """Cut a text into pieces of at most ``max_tokens``; together they are the text.

    A piece ends at the last paragraph end that fits, if that fills it by half; else at a line, a sentence or a word; in
    text without any border, between characters.

    Args:
        text: The text.
        max_tokens: Longest piece.
        reach: Tells how many characters of a text its first ``max_tokens`` tokens take; None = all of them.
    """
    start = 0
    while start < len(text):
        window = text[start : start + max_tokens * _MAX_CHARACTERS_PER_TOKEN]
        fits = reach(window)
        if fits is None and start + len(window) == len(text):
            yield window
            return
        end = _best_end(window, len(window) if fits is None else max(fits, 1))
        # A piece alone may have a token more than as part of the text; then it ends one border earlier.
        while end > 1 and reach(window[:end]) is not None:
            end = _best_end(window, end - 1)
        yield window[:end]
        start += end


def _best_end(window: str, limit: int) -> int:
    found = 0
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(window, 0, limit) if match.end() <= limit]
        if ends and ends[-1] * 2 >= limit:
            return ends[-1]
        found = max(found, ends[-1] if ends else 0)
    return found or limit
