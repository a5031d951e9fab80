import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.evaluate.sampling import sample, softmax_at, verify_greedy, verify_sampled

VOCABULARY = 4


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_greedy_acceptance_is_the_longest_common_prefix_plus_the_targets_own_token(drafted, choices):
    choices = choices[: len(drafted) + 1]
    logits = torch.nn.functional.one_hot(torch.tensor(choices), VOCABULARY).float()
    verdict = verify_greedy(logits, torch.tensor(drafted))
    agree = 0
    while agree < len(drafted) and drafted[agree] == choices[agree]:
        agree += 1
    assert (verdict.num_accepted, verdict.next_token) == (agree, choices[agree])


def test_a_drafter_equal_to_the_target_is_always_accepted():
    generator = torch.Generator().manual_seed(0)
    probs = softmax_at(torch.randn(5, VOCABULARY, generator=generator), 1.0)
    for _ in range(200):
        drafted = sample(probs[:-1], generator)
        assert verify_sampled(probs, probs[:-1], drafted, generator).num_accepted == 4


def test_a_token_that_the_target_never_takes_is_never_accepted():
    target = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2)
    draft = torch.tensor([[0.9, 0.1, 0.0, 0.0]])
    for seed in range(100):
        verdict = verify_sampled(target, draft, torch.tensor([0]), torch.Generator().manual_seed(seed))
        assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def chi_square(counts, probs):
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_speculative_sampling_keeps_the_targets_distribution_over_two_tokens():
    """Chi-square over all pairs of first and second token; the second's distribution depends on the first."""
    generator = torch.Generator().manual_seed(1)
    first = softmax_at(torch.randn(VOCABULARY, generator=generator), 1.0)
    second = softmax_at(torch.randn(VOCABULARY, VOCABULARY, generator=generator), 0.7)  # row: the token before
    after = torch.full((VOCABULARY,), 1 / VOCABULARY)
    draft_probs = softmax_at(torch.randn(2, VOCABULARY, generator=generator), 1.0)  # knows nothing of the target
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for _ in range(12_000):
        drafted = sample(draft_probs, generator)
        target_probs = torch.stack([first, second[drafted[0]], after])
        verdict = verify_sampled(target_probs, draft_probs, drafted, generator)
        tokens = [*drafted.tolist()[: verdict.num_accepted], verdict.next_token]
        if len(tokens) < 2:  # the next cycle would sample it from the target
            tokens.append(int(sample(second[tokens[0]][None], generator)))
        counts[tokens[0], tokens[1]] += 1
    expected = (first[:, None] * second).double().numpy()
    # 15 degrees of freedom: 37.7 is passed once in a thousand times.
    assert chi_square(counts, expected) < 37.7
    # The test can tell: the drafter's own distribution is far off.
    assert chi_square(counts, np.outer(draft_probs[0], draft_probs[1])) > 1000


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_every_verdict_is_a_token_the_target_can_take(seed, num_drafted):
    generator = torch.Generator().manual_seed(seed)
    target = softmax_at(torch.randn(num_drafted + 1, VOCABULARY, generator=generator), 0.3)
    draft = softmax_at(torch.randn(num_drafted, VOCABULARY, generator=generator), 0.3)
    drafted = sample(draft, generator)
    verdict = verify_sampled(target, draft, drafted, generator)
    assert 0 <= verdict.num_accepted <= num_drafted
    assert float(target[verdict.num_accepted, verdict.next_token]) > 0
