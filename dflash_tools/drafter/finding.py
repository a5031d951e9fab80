"""The result of one rule of ``check``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule and what was found.

    Attributes:
        rule: What must hold, in a few words.
        ok: False is a fault: an engine would refuse the checkpoint, or serve it wrongly without a word.
        found: What the checkpoint says.
        expected: What it should say; "" where found says it all.
        warning: The rule does not hold, but every known engine copes or only the pairing is in question.
    """

    rule: str
    ok: bool
    found: str
    expected: str = ""
    warning: bool = False

    def __str__(self) -> str:
        mark = "FAULT" if not self.ok else "warn " if self.warning else "ok   "
        unmet = (not self.ok or self.warning) and self.expected
        return f"{mark} {self.rule}: {self.found}" + (f"; expected {self.expected}" if unmet else "")


def fault_unless(holds: bool, rule: str, found: object, expected: object = "") -> Finding:
    """A rule whose breach is a fault."""
    return Finding(rule=rule, ok=holds, found=str(found), expected=str(expected))


def warn_unless(holds: bool, rule: str, found: object, expected: object = "") -> Finding:
    """A rule whose breach is worth knowing but harms no known engine."""
    return Finding(rule=rule, ok=True, warning=not holds, found=str(found), expected=str(expected))
