"""Answers on disk in the order they come, one conversation a line, safe against being killed at any moment."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash_tools.errors import ResumeError, UserError

Settings = dict[str, Any]


class Journal:
    """The unfinished part of a file of answers. Its first line holds the settings, each further line a conversation.

    Args:
        path: Made if it is not there.
        settings: What decides the answers.

    Raises:
        ResumeError: If it was begun under other settings, is damaged, or another process writes it.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what a full disk refuses is not tried again when the file is closed.
        self._file = path.open("ab", buffering=0)
        try:
            self._lock()
            self._open(settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, prompt_id: str) -> dict[str, Any]:
        """Give what was written of a conversation."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[prompt_id])
            entry: dict[str, Any] = json.loads(file.readline())
        return entry

    def append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write conversations, each with its ``id``; they are on the disk when this returns.

        Raises:
            UserError: If the disk is full.
        """
        if not entries:
            return
        lines = [to_line(entry) for entry in entries]
        offset = self._path.stat().st_size
        self._write(b"".join(lines))
        for entry, line in zip(entries, lines, strict=True):
            self._offsets[entry["id"]] = offset
            offset += len(line)

    def remove(self) -> None:
        """Delete the file, once its content stands elsewhere."""
        self._path.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(
                f"{self._path}: another process writes it; wait for it, or choose another --out"
            ) from None

    def _open(self, settings: Settings) -> None:
        """Find the conversations that are there, and cut off a line that was torn by a kill."""
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                name = "settings" if number == 1 else "id"
                try:
                    value = json.loads(line)[name]
                except (ValueError, TypeError, KeyError):
                    raise ResumeError(
                        f"{self._path}: line {number} is damaged, it should be JSON with {name}; remove "
                        f"{'the file' if number == 1 else 'the line'} and run the same command again"
                    ) from None
                if number == 1:
                    refuse_other_settings(self._path, value, settings)
                else:
                    self._offsets[value] = offset
                offset += len(line)
        self._file.truncate(offset)
        if offset == 0:
            self._write(to_line({"settings": settings}))

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written: {error.strerror}; free some space and run the same command again"
            ) from None


def refuse_other_settings(path: Path, found: Settings, wanted: Settings) -> None:
    """Stop if a file was made under other settings.

    Raises:
        ResumeError: It names each setting that differs.
    """
    wanted = json.loads(to_line(wanted))  # as it would be read back
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if names:
        listed = "; ".join(f"{name} was {found.get(name)!r}, is {wanted.get(name)!r}" for name in names)
        raise ResumeError(f"{path}: made with other settings: {listed}; set them back, or choose another --out")


def to_line(value: dict[str, Any]) -> bytes:
    """Write a JSON object as a line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
