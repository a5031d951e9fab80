"""Rows filled from all buckets: inside a window the longest sample first, each to the emptiest row.

Best-fit would fill rows a little better (.999 against .995 on a log-normal mix), but it pairs long samples with long
ones and leaves the short ones to rows of their own: batches of one length again. The emptiest row mixes all lengths.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tools.contracts.plan import PACKED_BUCKET_ID
from dflash_tools.plan.grouping import Groups, Limits
from dflash_tools.plan.streams import Purpose, random_order

# A window holds a little less than its rows, since the last samples rarely close every gap.
_FILL_PERMILLE = 998


@dataclass(frozen=True, slots=True)
class _Window:
    """Windows side by side, to be filled in lockstep: sample j of every window at once.

    Attributes:
        samples: Positions of samples, -1 where a window has fewer. Shape: (num_windows, most samples).
        num_rows: Rows that a window may fill.
    """

    samples: NDArray[np.int64]
    num_rows: int


def pack_samples(
    num_tokens: NDArray[np.int64], num_anchors: NDArray[np.int64], limits: Limits, *, seed: int, epoch: int
) -> Groups:
    """Fill rows of ``token_budget`` tokens and ``anchor_budget`` blocks with whole samples.

    Shuffled samples are cut into windows of ``sort_window`` rows' worth. What a window cannot place goes into the
    windows of the next pass. A sample beyond a budget makes a row alone; ``max_batch_size`` does not apply.

    Args:
        num_tokens: Length of every sample. Shape: (num_samples,). Unit: tokens.
        num_anchors: Blocks of every sample; zeros where no budget is set. Shape: (num_samples,).
        limits: Budgets of a row and the window.
        seed: Seed of the plan.
        epoch: Each epoch has its own composition.
    """
    anchor_budget = limits.anchor_budget if limits.anchor_budget is not None else int(num_anchors.sum())
    budgets = (limits.token_budget, anchor_budget)
    sizes = (num_tokens, num_anchors)
    pool = random_order(len(num_tokens), seed=seed, epoch=epoch, purpose=Purpose.COMPOSITION)
    alone = (num_tokens > budgets[0]) | (num_anchors > budgets[1])
    placed, rows = [pool[alone[pool]]], [np.arange(np.count_nonzero(alone))]
    pool, num_rows = pool[~alone[pool]], int(np.count_nonzero(alone))
    while len(pool):
        # The scarcer of the two budgets decides how much a window holds and which row is the emptiest.
        scarce = int(num_anchors[pool].sum() * budgets[0] > num_tokens[pool].sum() * budgets[1])
        windows = _cut_windows(pool, sizes[scarce][pool], budgets[scarce], limits.sort_window)
        row = _fill_rows(windows, sizes[scarce], sizes[1 - scarce], budgets[scarce], budgets[1 - scarce])
        in_row = row >= 0
        names, row_ids = np.unique(row[in_row], return_inverse=True)
        placed.append(windows.samples[in_row])
        rows.append(num_rows + row_ids)
        num_rows += len(names)
        pool = windows.samples[(windows.samples >= 0) & ~in_row]
    row_of_sample = np.concatenate(rows)
    order = np.argsort(row_of_sample, kind="stable")
    return Groups(
        samples=np.concatenate(placed)[order],
        offsets=np.concatenate([[0], np.cumsum(np.bincount(row_of_sample))]),
        bucket_ids=np.full(num_rows, PACKED_BUCKET_ID, dtype=np.int32),
    )


def _cut_windows(pool: NDArray[np.int64], sizes: NDArray[np.int64], budget: int, num_rows: int) -> _Window:
    """Cut the pool into windows of about ``num_rows`` rows' worth, each sorted by size, largest first."""
    before = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    num_windows = total * 1000 // (num_rows * budget * _FILL_PERMILLE)
    if num_windows == 0:
        num_windows, num_rows = 1, max(1, -(-total // budget))
    window = np.minimum(before * num_windows // max(total, 1), num_windows - 1)  # sizes may be 0 at the end
    bounds = np.searchsorted(window, np.arange(num_windows + 1))
    samples = np.full((num_windows, int(np.diff(bounds).max())), -1, dtype=np.int64)
    samples[window, np.arange(len(pool)) - bounds[window]] = pool[np.lexsort((-sizes, window))]
    return _Window(samples, num_rows)


def _fill_rows(
    windows: _Window,
    sizes: NDArray[np.int64],
    other_sizes: NDArray[np.int64],
    budget: int,
    other_budget: int,
) -> NDArray[np.int64]:
    """Give each sample the emptiest row of its window that holds it. Returns rows; -1 where none does."""
    num_windows, most = windows.samples.shape
    window = np.arange(num_windows)
    room = np.full((num_windows, windows.num_rows), budget, dtype=np.int64)
    other_room = np.full_like(room, other_budget)
    row = np.full((num_windows, most), -1, dtype=np.int64)
    for place in range(most):
        sample = windows.samples[:, place]
        size, other_size = sizes[sample], other_sizes[sample]
        best = np.where(other_room >= other_size[:, None], room, -1).argmax(axis=1)
        fits = (sample >= 0) & (room[window, best] >= size) & (other_room[window, best] >= other_size)
        room[window[fits], best[fits]] -= size[fits]
        other_room[window[fits], best[fits]] -= other_size[fits]
        row[fits, place] = (window * windows.num_rows + best)[fits]
    return row
