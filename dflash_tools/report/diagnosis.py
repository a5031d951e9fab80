"""Choosing what a report says first: findings with a weight, of which the heaviest seven are shown."""

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_tools.report.document import MAX_SENTENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something unusual.

    Attributes:
        rule: Name of the rule, for tests and scripts.
        weight: How much it matters, 0 to 1: roughly the share of the run (batches, time, tokens) that it touches, or 1
            for what makes a run worthless.
        sentence: What, by how much, compared with what, and which setting changes it.
    """

    rule: str
    weight: float
    sentence: str


def choose_sentences(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The sentences of the heaviest findings, heaviest first."""
    ranked = sorted(findings, key=lambda finding: -finding.weight)
    return tuple(finding.sentence for finding in ranked[:MAX_SENTENCES])
