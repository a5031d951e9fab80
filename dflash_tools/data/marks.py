"""Marks that travel through a chat template inside the text and are read off afterwards.

So text, supervised spans and typed control tokens come from one rendering and cannot drift:

* ``{% generation %}`` blocks are rendered between GENERATION_START and GENERATION_END;
* a control token that someone typed into a message carries TYPED after its first character.

All three are Unicode noncharacters, which no text may contain; a row that does is dropped.
"""

import re
from typing import Any

TYPED = "\ufdd0"
GENERATION_START = "\ufdd1"
GENERATION_END = "\ufdd2"
RESERVED = re.compile(f"[{TYPED}{GENERATION_START}{GENERATION_END}]")
_NOTHING = re.compile(r"(?!)")


def token_pattern(tokens: set[str]) -> re.Pattern[str]:
    """Match any of some tokens, the longest first; one character alone cannot be told from text."""
    longest_first = sorted((token for token in tokens if len(token) > 1), key=lambda token: (-len(token), token))
    if not longest_first:
        return _NOTHING
    # The characters that tokens begin with first: most of a text is then passed over without trying each token.
    first = re.escape("".join(sorted({token[0] for token in longest_first})))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})")


def mark_typed_tokens(value: Any, pattern: re.Pattern[str]) -> Any:
    """Put TYPED into every control token that stands in the strings of a value; other objects stay the same ones.

    Args:
        value: Messages or tools.
        pattern: Matches any control token.
    """
    if isinstance(value, str):
        return _mark_text(value, pattern) if pattern.search(value) else value
    if isinstance(value, dict):
        # Keys too: the arguments of a tool call are whatever someone typed.
        return {mark_typed_tokens(key, pattern): mark_typed_tokens(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [mark_typed_tokens(item, pattern) for item in value]
    return value


def _mark_text(text: str, pattern: re.Pattern[str]) -> str:
    pieces: list[str] = []
    at = 0
    while match := pattern.search(text, at):
        # One character on, not behind the token: a token may begin inside another one.
        pieces += [text[at : match.start() + 1], TYPED]
        at = match.start() + 1
    return "".join([*pieces, text[at:]])
