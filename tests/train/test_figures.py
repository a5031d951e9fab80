import numpy as np
import torch

from dflash_tools.drafter.blocks import build_blocks
from dflash_tools.drafter.loss import LossSums
from dflash_tools.train.figures import figures_row, pool


def row_of(num_tokens, anchors, correct):
    """Blocks of five slots over a supervised text; those near its end are truncated."""
    ids, mask = np.arange(num_tokens, dtype=np.int32), np.ones(num_tokens, np.uint8)
    blocks = build_blocks([ids], [mask], [np.array(anchors)], block_size=5, mask_token_id=99, gamma=4.0)
    sums = LossSums(
        weighted_sum=torch.tensor(2.0),
        label_weight=blocks.label_weight,
        loss_A=torch.ones(len(blocks)),
        correct_AS=torch.tensor(correct, dtype=torch.bool),
        supervised_A=blocks.supervised_A,
    )
    return figures_row(sums, blocks)


def test_truncated_blocks_are_counted_apart():
    """TN-11: a masked tail is neither a miss nor a hit."""
    figures = pool(row_of(8, [3, 5], [[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]])[None])
    assert (figures.num_blocks, figures.num_accepted, figures.num_truncated_blocks) == (1, 1, 1)
    assert figures.acceptance_length == 2.0


def test_sums_pool_by_adding_and_no_whole_block_means_length_one():
    none = row_of(6, [3, 4], [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]])
    some = row_of(9, [0, 4], [[0, 1, 1, 1, 1], [0, 1, 0, 1, 1]])
    assert pool(none[None]).num_blocks == 0
    assert pool(none[None]).acceptance_length == 1.0
    both = pool(torch.stack((none, some)))
    assert (both.num_blocks, both.num_accepted, both.num_truncated_blocks) == (2, 5, 2)
    assert both.acceptance_length == 3.5
