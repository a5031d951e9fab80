import torch

from dflash_tools.drafter.metrics import AcceptanceSums, accepted_prefix, sum_acceptance


def test_a_prefix_ends_at_the_first_wrong_guess_and_the_anchor_does_not_count():
    """TN-11."""
    correct = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)
    assert accepted_prefix(correct).tolist() == [2, 0, 4]


def test_truncated_blocks_are_counted_apart():
    """TN-11: a masked tail is neither a miss nor a hit."""
    correct = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    sums = sum_acceptance(correct, torch.tensor([2, 4]))
    assert sums == AcceptanceSums(num_blocks=1, num_accepted=1, num_truncated_blocks=1)
    assert sums.acceptance_length == 2.0


def test_sums_pool_by_adding_and_no_whole_block_means_length_one():
    none = AcceptanceSums(num_blocks=0, num_accepted=0, num_truncated_blocks=3)
    some = AcceptanceSums(num_blocks=4, num_accepted=6, num_truncated_blocks=0)
    assert none.acceptance_length == 1.0
    assert none + some == AcceptanceSums(num_blocks=4, num_accepted=6, num_truncated_blocks=3)
    assert (none + some).acceptance_length == 2.5
