"""What the data room hands on: token samples, and one result for every input row."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Status = Literal["kept", "dropped", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """Token ids and loss mask of one sample.

    Attributes:
        input_ids: Token ids. Shape: (num_tokens,).
        loss_mask: 1 = this token is supervised. Shape: (num_tokens,).
        conversation_id: Hash of the conversation's content, 32 hex digits; samples of one conversation share it.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Where one input row went.

    Attributes:
        source: File (or source) the row came from, as named in the manifest.
        source_row: Line number in a JSONL file, else the position in the source; both from 1.
        status: What became of the row.
        samples: Its samples; empty unless kept.
        reason: Why it was dropped, a word from docs/data.md; empty if kept.
        detail: The reason in words, with what was found.
        notes: What a reader of the summary must know about a kept row, e.g. ``truncated`` or ``duplicate``.
    """

    source: str
    source_row: int
    status: Status
    samples: tuple[TokenSample, ...] = ()
    reason: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()


class RowError(Exception):
    """One row cannot become a sample; the others go on."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def sample_id(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], occurrence: int) -> str:
    """Name a sample by its content.

    Args:
        input_ids: Token ids. Shape: (num_tokens,).
        loss_mask: 0 or 1. Shape: (num_tokens,).
        occurrence: How many equal samples came before this one, so that repeats have names of their own.

    Returns:
        32 hex digits.
    """
    digest = hashlib.sha256()
    digest.update(f"{len(input_ids)}:{occurrence}:".encode())
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()[:32]


def has_supervised_pair(loss_mask: NDArray[np.uint8]) -> bool:
    """Tell whether two supervised tokens follow each other: an anchor, and a token to draft. Shape: (num_tokens,)."""
    return b"\1\1" in loss_mask.tobytes()
