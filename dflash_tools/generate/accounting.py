"""Where every input row went: answered or dropped, by reason."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_tools.data import RowResult
from dflash_tools.data.sample import RowError
from dflash_tools.generate.dialogue import Dialogue
from dflash_tools.generate.journal import Journal
from dflash_tools.generate.prompts import Prompt


@dataclass
class Rows:
    """Every input row of the data.

    Attributes:
        num_read: Number of rows.
        prompt_ids: In the order of the input.
        row_numbers: Row of each prompt; a weight above 1 makes several prompts of a row.
        dropped: Source, row, reason and detail of each row without answers, by its number.
        notes: How many prompts carry which note.
    """

    num_read: int = 0
    prompt_ids: list[str] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    dropped: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def num_missing(self, journal: Journal) -> int:
        """Count the prompts that have no answers yet."""
        return sum(prompt_id not in journal for prompt_id in self.prompt_ids)

    def drop_unanswered(self, unanswered: Iterable[Dialogue], journal: Journal) -> None:
        """List rows none of whose prompts were answered."""
        numbers = dict(zip(self.prompt_ids, self.row_numbers, strict=True))
        kept = {number for prompt_id, number in numbers.items() if prompt_id in journal}
        for dialogue in unanswered:
            number = numbers[dialogue.prompt.id]
            if number not in kept and dialogue.problem is not None:
                self.dropped[number] = _describe(dialogue.prompt, dialogue.problem)


def read_all(results: Iterator[Prompt | RowResult]) -> Rows:
    """Read every row once; only ids and what was dropped stay in memory."""
    rows = Rows()
    for result in results:
        if isinstance(result, RowResult):
            rows.dropped[rows.num_read] = _describe(result, RowError(result.reason, result.detail))
            rows.num_read += 1
            continue
        rows.num_read += result.copy == 0
        rows.prompt_ids.append(result.id)
        rows.row_numbers.append(rows.num_read - 1)
        rows.notes.update(result.questions.notes)
    return rows


def make_figures(rows: Rows, journal: Journal) -> dict[str, Any]:
    """Count rows, samples and tokens; kept + dropped + merged = read."""
    counts: Counter[str] = Counter()
    for prompt_id in rows.prompt_ids:
        if prompt_id not in journal:
            continue
        entry = journal.read(prompt_id)
        counts["num_conversations"] += 1
        counts["num_ended_early"] += bool(entry["ended_early"])
        for row in entry["rows"]:
            counts["num_samples"] += 1
            counts["num_tokens"] += len(row["input_ids"])
            counts["num_supervised_tokens"] += sum(row["loss_mask"])
            counts["num_truncated"] += row["truncated"]
    reasons = Counter(dropped["reason"] for dropped in rows.dropped.values())
    names = ("num_conversations", "num_samples", "num_tokens", "num_supervised_tokens", "num_truncated")
    return {
        "read": rows.num_read,
        "kept": rows.num_read - len(rows.dropped),
        "dropped": len(rows.dropped),
        "merged": 0,
        "dropped_by_reason": dict(reasons.most_common()),
        **{name: counts[name] for name in (*names, "num_ended_early")},
        "notes": dict(sorted(rows.notes.items())),
    }


def _describe(row: Prompt | RowResult, problem: RowError) -> dict[str, Any]:
    return {
        "source": row.source,
        "source_row": row.source_row,
        "reason": problem.reason,
        "detail": problem.detail,
    }
