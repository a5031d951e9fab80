"""Rows of JSON text: one object per line, one array, or pretty-printed values, told apart by how the file begins.

Rows leave here as bytes; parsing them is the workers' part. A file is read in blocks: only the row at hand is held.
"""

from collections.abc import Iterator
from pathlib import Path

from dflash_tools.data.files import FileKind, refuse_foreign
from dflash_tools.data.json_scanner import BOM, MAX_ROW_BYTES, DamagedFile, JsonScanner
from dflash_tools.data.raw import RawRow, RawRows

BLOCK_BYTES = 1 << 20
_CAREFUL_BYTES = 4096
_HEAD_BYTES = 4096


def read_blocks(path: Path, kind: FileKind) -> Iterator[bytes]:
    """Read a file in blocks, unpacked; members or frames of a packed file follow each other without a seam.

    Raises:
        DamagedFile: After the last good byte, if the packed data is cut off or broken.
    """
    if kind is FileKind.JSON:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
        return
    good_bytes = 0
    try:
        for block in _unpack(path, kind, BLOCK_BYTES):
            good_bytes += len(block)
            yield block
    except OSError as error:
        # The failing read swallowed up to a block of good bytes: fetch them in ever smaller reads.
        yield from _last_good_bytes(path, kind, good_bytes)
        raise DamagedFile(str(error)) from None


def _unpack(path: Path, kind: FileKind, block_bytes: int) -> Iterator[bytes]:
    import pyarrow

    with pyarrow.OSFile(str(path)) as packed, pyarrow.CompressedInputStream(packed, kind.value) as stream:
        while block := stream.read(block_bytes):
            yield block


def _last_good_bytes(path: Path, kind: FileKind, good_bytes: int) -> Iterator[bytes]:
    for block_bytes in (_CAREFUL_BYTES, 1):
        seen = 0
        try:
            for block in _unpack(path, kind, block_bytes):
                seen += len(block)
                if seen > good_bytes:
                    yield block[max(len(block) - (seen - good_bytes), 0) :]
                    good_bytes = seen
        except OSError:
            continue


def read_json_rows(path: Path, kind: FileKind, name: str) -> RawRows:
    """Read the rows of a JSON file.

    Args:
        path: The file.
        kind: JSON, or how it is packed.
        name: What to call it in an error.

    Raises:
        DataError: If the unpacked content is surely no JSON text.
    """
    head, blocks = _take_head(read_blocks(path, kind))
    refuse_foreign(head, name)
    start = head.removeprefix(BOM).lstrip()
    first_line, is_whole, _ = start.partition(b"\n")
    if start.startswith(b"[") or (is_whole and first_line.strip() == b"{"):
        yield from _read_values(blocks)
    else:
        yield from _read_lines(blocks)


def _take_head(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Look at the first bytes; give them, and all blocks with whatever ends them."""
    head = b""
    damage: DamagedFile | None = None
    try:
        while len(head) < _HEAD_BYTES and (block := next(blocks, b"")):
            head += block
    except DamagedFile as error:
        damage = error

    def all_blocks() -> Iterator[bytes]:
        yield head
        if damage is not None:
            raise damage
        yield from blocks

    return head, all_blocks()


def _read_lines(blocks: Iterator[bytes]) -> RawRows:
    line_number = 1
    pending: list[bytes] = []
    try:
        for block in blocks:
            *ended, rest = block.split(b"\n")
            for line in ended:
                if pending:
                    pending.append(line)
                    line = b"".join(pending)
                    pending = []
                yield from _line(line, line_number)
                line_number += 1
            if rest:
                pending.append(rest)
                if len(pending) * BLOCK_BYTES > MAX_ROW_BYTES:
                    raise DamagedFile(f"a line of over {MAX_ROW_BYTES >> 20} MiB begins here")
    except DamagedFile as damage:
        yield RawRow(line_number, None, damage=str(damage))
        return
    yield from _line(b"".join(pending), line_number)


def _line(line: bytes, line_number: int) -> RawRows:
    # A byte-order mark opens a file, and stands inside one that was put together from several.
    line = line.removeprefix(BOM).strip()
    if line:
        yield RawRow(line_number, line)


def _read_values(blocks: Iterator[bytes]) -> RawRows:
    """Read top-level values; the elements of a top-level array are rows, unless they are the messages of one row."""
    scanner = JsonScanner(blocks)
    arrays_hold_rows: bool | None = None
    number = 0
    try:
        while byte := scanner.next_byte():
            if byte == b"[" and arrays_hold_rows is None:
                arrays_hold_rows = not scanner.array_holds_messages()
            if byte == b"[" and arrays_hold_rows:
                scanner.step()
                while scanner.next_byte() not in (b"]", b""):
                    line, value = scanner.take()
                    number += 1
                    yield RawRow(number, value, f"line {line}")
                if not scanner.step():
                    raise DamagedFile("the file ends inside its array, the closing bracket is missing")
            else:
                line, value = scanner.take()
                number += 1
                yield RawRow(number, value, f"line {line}")
    except DamagedFile as damage:
        yield RawRow(number + 1, None, f"line {scanner.line}", str(damage))
