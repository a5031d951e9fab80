"""The run log: one line of JSON per step and per evaluation, appended and never rewritten.

A restart appends under a larger ``attempt``; of two records of a step the one with the larger attempt counts.
"""

import json
import os
from collections.abc import Collection, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from dflash_tools.contracts.record import EvaluationRecord, StepRecord
from dflash_tools.contracts.run_folder import EVALUATION_FILE, LOG_FILE
from dflash_tools.errors import ResumeError


class RunLog:
    """Appends records to ``log.jsonl`` and ``evaluation.jsonl``; a reader may look at them at any time."""

    def __init__(self, run_dir: Path) -> None:
        """Open both files for appending; half a line that a killed process left is cut off first."""
        self._steps = _open_for_append(run_dir / LOG_FILE)
        self._evaluations = _open_for_append(run_dir / EVALUATION_FILE)

    def write_step(self, record: StepRecord) -> None:
        """Append one step."""
        _write_line(self._steps, record.model_dump_json())

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Append one evaluation."""
        _write_line(self._evaluations, record.model_dump_json())

    def flush(self) -> None:
        """Force both files to disk, so that a committed checkpoint never knows more than the log."""
        for file in (self._steps, self._evaluations):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Force both files to disk and close them."""
        self.flush()
        self._steps.close()
        self._evaluations.close()


def read_evaluations(run_dir: Path) -> dict[int, EvaluationRecord]:
    """Evaluations by step, ascending; of several the one with the largest attempt."""
    newest: dict[int, EvaluationRecord] = {}
    for line in _whole_lines(run_dir / EVALUATION_FILE):
        record = EvaluationRecord.model_validate_json(line)
        if record.step not in newest or record.attempt >= newest[record.step].attempt:
            newest[record.step] = record
    return dict(sorted(newest.items()))


def read_steps(run_dir: Path, keys: Collection[str] | None = None) -> dict[int, dict[str, Any]]:
    """Step records by step, ascending, as plain JSON; of several the one with the largest attempt.

    Args:
        run_dir: The run folder.
        keys: Keep only these keys of a record; None = all. A long log with all of them takes much memory.
    """
    newest: dict[int, tuple[int, dict[str, Any]]] = {}
    for line in _whole_lines(run_dir / LOG_FILE):
        try:
            record = json.loads(line)
            step, attempt = record["step"], record["attempt"]
        except (ValueError, KeyError, TypeError):
            raise ResumeError(
                f"{run_dir / LOG_FILE}: the line {line[:40]!r} is no record; restore the file, or take that line out"
            ) from None
        if step not in newest or attempt >= newest[step][0]:
            newest[step] = (attempt, record if keys is None else {key: record[key] for key in keys})
    return {step: record for step, (_, record) in sorted(newest.items())}


def _whole_lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            # A process that is writing, or was killed, may have left half a line at the end.
            yield from (line for line in file if line.endswith("\n"))


def _open_for_append(path: Path) -> TextIOWrapper:
    if path.is_file():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8", buffering=1)


def _write_line(file: TextIOWrapper, text: str) -> None:
    file.write(text + "\n")
