"""JSON documents that carry the SHA-256 of their own bytes, checked before anything parses them."""

import hashlib
import re

_FIELD = '"checksum": ""'
_SEAL = re.compile(rb'"checksum": "([0-9a-f]{64})"\n\}\n\Z')


def seal(text: str) -> bytes:
    """Fill the checksum of an indented JSON object whose last field is an empty ``checksum``.

    Raises:
        ValueError: If the text does not end with that field.
    """
    blank = text if text.endswith("\n") else text + "\n"
    ending = f"{_FIELD}\n}}\n"
    if not blank.endswith(ending):
        raise ValueError("a sealed document must end with an empty checksum field")
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return (blank.removesuffix(ending) + f'"checksum": "{digest}"\n}}\n').encode()


def find_fault(content: bytes) -> str | None:
    """Check a sealed document against its own checksum.

    Returns:
        None if it is whole, else what is wrong, in words.
    """
    match = _SEAL.search(content)
    if match is None:
        return "truncated or damaged: it does not end with its checksum"
    blank = content[: match.start()] + f"{_FIELD}\n}}\n".encode()
    if hashlib.sha256(blank).hexdigest() != match.group(1).decode():
        return "damaged: its bytes do not match its checksum"
    return None
