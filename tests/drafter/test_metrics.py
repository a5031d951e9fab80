import torch

from dflash_tools.drafter.metrics import accepted_prefix


def test_a_prefix_ends_at_the_first_wrong_guess_and_the_anchor_does_not_count():
    """TN-11."""
    correct = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)
    assert accepted_prefix(correct).tolist() == [2, 0, 4]
