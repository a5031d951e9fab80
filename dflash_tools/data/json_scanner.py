"""Where JSON values end in a stream of bytes, found without building them; only the value at hand is held."""

import re
from collections.abc import Iterator

from pydantic_core import from_json

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 1 << 30

_GAP = re.compile(rb"(?:[\s,]|\xef\xbb\xbf)*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BARE = re.compile(rb'[^\s,"\[\]{}]++')
# Inside a value only these matter: whole strings, and brackets. A quote alone is a string that goes on.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)


class DamagedFile(Exception):
    """The bytes end or break off here; what came before is good."""


def find_value_end(text: bytes | bytearray, start: int, is_last: bool) -> int | None:
    """Find where the JSON value at ``start`` ends.

    Brackets are only counted: whether the value is valid JSON is the parser's part. A stray closing bracket is a value
    of one byte, so that a scan always goes on.

    Args:
        text: Bytes so far.
        start: Position of the value's first byte.
        is_last: No more bytes will come.

    Returns:
        The position after the value, or None if it goes on after ``text``.
    """
    first = text[start : start + 1]
    if first == b'"':
        string = _STRING.match(text, start)
        return string.end() if string else None
    if first in (b"]", b"}"):
        return start + 1
    if first not in (b"[", b"{"):
        bare = _BARE.match(text, start)
        return bare.end() if bare and (is_last or bare.end() < len(text)) else None
    depth = 0
    for mark in _MARK.finditer(text, start):
        found = mark.group()
        if found in (b"[", b"{"):
            depth += 1
        elif found in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                return mark.end()
        elif found == b'"':
            return None
    return None


class JsonScanner:
    """Walks over the values of a stream of bytes.

    Attributes:
        line: Line of the next byte, from 1.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.line = 1
        self._blocks = blocks
        self._buffer = bytearray()
        self._at = 0
        self._is_last = False

    def _grow(self) -> None:
        # At least double what is held: a long value is then scanned a few times, not once per block.
        del self._buffer[: self._at]
        self._at = 0
        wanted = 2 * len(self._buffer)
        while not self._is_last:
            block = next(self._blocks, b"")
            self._is_last = not block
            self._buffer += block
            if len(self._buffer) > wanted:
                return

    def _go_to(self, end: int) -> None:
        self.line += self._buffer.count(b"\n", self._at, end)
        self._at = end

    def next_byte(self) -> bytes:
        """Go over white space and commas; show the byte there, or nothing at the end of the stream."""
        while True:
            gap = _GAP.match(self._buffer, self._at)
            assert gap is not None
            self._go_to(gap.end())
            # A byte-order mark may be cut by the end of the buffer.
            if self._is_last or len(self._buffer) - self._at >= len(BOM):
                return bytes(self._buffer[self._at : self._at + 1])
            self._grow()

    def step(self) -> bool:
        """Step over one byte; False at the end of the stream."""
        if self._at >= len(self._buffer):
            return False
        self._go_to(self._at + 1)
        return True

    def take(self) -> tuple[int, bytes]:
        """Take the value here.

        Returns:
            Line it starts on, and its bytes.

        Raises:
            DamagedFile: If the stream ends inside it.
        """
        end = self._end_from(0)
        line, value = self.line, bytes(self._buffer[self._at : end])
        self._go_to(end)
        return line, value

    def array_holds_messages(self) -> bool:
        """Tell whether the array here is one conversation: its first element has a role but no list of messages."""
        offset = 1
        while not (gap := _GAP.match(self._buffer, self._at + offset)) or gap.end() >= len(self._buffer):
            if self._is_last:
                return False
            self._grow()
        offset = gap.end() - self._at
        if self._buffer[self._at + offset : self._at + offset + 1] != b"{":
            return False
        end = self._end_from(offset)
        try:
            first = from_json(bytes(self._buffer[self._at + offset : end]))
        except ValueError:
            return False
        return isinstance(first, dict) and not first.keys().isdisjoint({"role", "from"}) and "messages" not in first

    def _end_from(self, offset: int) -> int:
        while (end := find_value_end(self._buffer, self._at + offset, self._is_last)) is None:
            if self._is_last:
                raise DamagedFile("the file ends inside this value")
            if len(self._buffer) > MAX_ROW_BYTES:
                raise DamagedFile(f"a value of over {MAX_ROW_BYTES >> 20} MiB begins here")
            self._grow()
        return end
