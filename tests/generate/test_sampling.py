"""Random numbers belong to an answer, not to a batch."""

import numpy as np
import pytest
import torch

from dflash_tools.config import SamplingSection
from dflash_tools.generate.sampling import choose_tokens
from dflash_tools.generate.seeds import answer_seed, uniform_numbers


def choose(logits, uniform, **options):
    sampling = SamplingSection(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **options})
    return choose_tokens(torch.tensor(logits), torch.tensor(uniform, dtype=torch.float64), sampling).tolist()


def test_temperature_zero_takes_the_likeliest():
    assert choose([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]], [0.9, 0.9], temperature=0.0) == [1, 0]


def test_the_draws_follow_the_distribution():
    probs = np.array([0.5, 0.3, 0.2])
    uniform = (np.arange(1000) + 0.5) / 1000
    chosen = choose([np.log(probs).tolist()] * 1000, uniform.tolist())
    assert np.allclose(np.bincount(chosen) / 1000, probs, atol=0.002)


def test_temperature_sharpens_and_flattens():
    uniform = ((np.arange(1000) + 0.5) / 1000).tolist()
    shares = [
        np.bincount(choose([[1.0, 0.0]] * 1000, uniform, temperature=temperature))[0] / 1000
        for temperature in (0.5, 2.0)
    ]
    expected = [1 / (1 + np.exp(-1 / temperature)) for temperature in (0.5, 2.0)]
    assert np.allclose(shares, expected, atol=0.002)


@pytest.mark.parametrize(
    ("options", "kept"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0}), ({"top_p": 0.6}, {0, 1}), ({}, {0, 1, 2})]
)
def test_top_k_and_top_p_leave_the_likeliest(options, kept):
    logits = np.log([0.52, 0.28, 0.2]).tolist()
    uniform = (np.arange(100) / 100).tolist()
    assert set(choose([logits] * 100, uniform, **options)) == kept


def test_a_number_just_below_one_is_still_a_token_that_is_kept():
    assert choose([[2.0, 1.0, 0.0]], [np.nextafter(1.0, 0.0)], top_k=2) == [1]


def test_seeds_differ_by_prompt_and_turn_and_repeat():
    seeds = {answer_seed(0, "a", 0), answer_seed(0, "a", 1), answer_seed(0, "b", 0), answer_seed(1, "a", 0)}
    assert len(seeds) == 4
    assert answer_seed(0, "a", 0) in seeds
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert (uniform_numbers(5, 10)[:4] == uniform_numbers(5, 4)).all()
