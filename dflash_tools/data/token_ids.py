"""Rows that are tokenised already: taken as they are, once they are shown to fit."""

from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tools.data.encode import Encoded
from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import TokenIds


def check_token_ids(row: TokenIds, num_ids: int, max_tokens: int, *, needs_mask: bool) -> tuple[str, Encoded]:
    """Check token ids and loss mask.

    Args:
        row: As it stands in the file.
        num_ids: Ids are below this.
        max_tokens: Longest sample; the rest is cut off.
        needs_mask: A row without a mask is refused; otherwise all of it is supervised.

    Returns:
        Hash of the conversation it names, else of the ids, 32 hex digits; and the ids with their mask.

    Raises:
        RowError: If ids or mask do not fit.
    """
    ids = _int_array(row.input_ids, "input_ids", "bad_token_ids")
    outside = ids[(ids < 0) | (ids >= num_ids)]
    if len(outside):
        raise RowError("bad_token_ids", f"input_ids holds {outside[0]}; the tokenizer's ids are below {num_ids}")
    if row.loss_mask is None and needs_mask:
        raise RowError("bad_loss_mask", "input_ids without loss_mask; add one, or set loss_on = 'all'")
    mask = (
        np.ones(len(ids), np.int64)
        if row.loss_mask is None
        else _int_array(row.loss_mask, "loss_mask", "bad_loss_mask")
    )
    if len(mask) != len(ids):
        raise RowError("bad_loss_mask", f"loss_mask has {len(mask)} entries, input_ids has {len(ids)}")
    strange = mask[(mask != 0) & (mask != 1)]
    if len(strange):
        raise RowError("bad_loss_mask", f"loss_mask holds {strange[0]}; expected 0 and 1")
    encoded = Encoded(ids[:max_tokens].astype(np.int32), mask[:max_tokens].astype(np.uint8), len(ids) > max_tokens)
    identity = ids.astype("<i8").tobytes() if row.conversation_id is None else row.conversation_id.encode()
    return sha256(identity).hexdigest()[:32], encoded


def _int_array(values: list[Any], key: str, reason: str) -> NDArray[np.int64]:
    if not values:
        raise RowError(reason, f"{key} is empty")
    if not all(type(value) in (int, bool) for value in values):
        raise RowError(reason, f"{key} holds something that is no integer")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise RowError(reason, f"{key} holds an integer beyond 64 bits") from None
