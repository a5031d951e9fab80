import math

from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.evaluate.decode import Answer, Cycle
from dflash_tools.evaluate.figures import (
    Decoded,
    acceptance_figures,
    bootstrap_interval,
    by_context,
    by_kind,
    divergence,
    speed_figures,
)
from dflash_tools.evaluate.prompts import Prompt

COUNTS = st.lists(st.integers(0, 7), max_size=40)


def cycles_of(counts, start=10):
    return [Cycle(start=start, num_accepted=n, num_tokens=n + 1, draft_seconds=0.1, target_seconds=0.3) for n in counts]


def decoded_of(counts, *, kind="chat", start=10, tokens=(1, 2, 3), plain=(1, 2, 3)):
    fast = Answer(token_ids=list(tokens), gaps=[0.5] * len(tokens), cycles=cycles_of(counts, start), decode_seconds=2.0)
    alone = Answer(token_ids=list(plain), gaps=[0.25] * len(plain), cycles=cycles_of([0, 0], start), decode_seconds=4.0)
    return Decoded(prompt=Prompt(name="p", kind=kind, token_ids=(1,)), fast=fast, plain=alone)


@given(COUNTS)
def test_positions_histogram_and_length_say_the_same(counts):
    figures = acceptance_figures(cycles_of(counts), 7)
    assert figures["acceptance_histogram"] == [counts.count(n) for n in range(8)]
    assert figures["acceptance_by_position"] == sorted(figures["acceptance_by_position"], reverse=True)
    if counts:
        mean = sum(counts) / len(counts)
        assert math.isclose(figures["acceptance_length"], 1 + mean, abs_tol=1e-5)
        assert math.isclose(figures["accepted_draft_tokens"], mean, abs_tol=1e-5)
        assert math.isclose(sum(figures["acceptance_by_position"]), mean, abs_tol=1e-3)
    else:
        assert math.isnan(figures["acceptance_length"])


@given(st.lists(COUNTS.filter(bool), min_size=2, max_size=10))
def test_the_interval_holds_the_pooled_length_of_like_prompts_and_lies_in_range(groups):
    low, high = bootstrap_interval([decoded_of(group) for group in groups])
    assert 1.0 <= low <= high <= 8.0
    lengths = [1 + sum(group) / len(group) for group in groups]
    assert low >= min(lengths) - 1e-3
    assert high <= max(lengths) + 1e-3


def test_one_prompt_has_no_interval():
    assert bootstrap_interval([decoded_of([1, 2])]) is None


def test_speed_counts_tokens_after_the_prefill():
    speed = speed_figures([decoded_of([1, 3])])
    assert speed["tokens_per_second"] == 3.0  # 6 tokens in 2 s
    assert speed["plain_tokens_per_second"] == 0.5  # 2 tokens in 4 s
    assert (speed["draft_seconds_per_cycle"], speed["target_seconds_per_cycle"]) == (0.1, 0.3)


def test_kinds_and_contexts_are_told_apart():
    decoded = [decoded_of([1], kind="a", start=256), decoded_of([3], kind="b", start=257), decoded_of([5], kind="a")]
    assert [(row["kind"], row["acceptance_length"]) for row in by_kind(decoded, 7)] == [("a", 4.0), ("b", 4.0)]
    rows = by_context(decoded, 7)
    assert [(row["min_tokens"], row["max_tokens"], row["num_cycles"]) for row in rows] == [(1, 256, 2), (257, 1024, 1)]


def test_the_first_difference_comes_with_both_leads():
    assert divergence(decoded_of([1])) is None
    assert divergence(decoded_of([1], tokens=(1, 9, 3))) == {
        "position": 1,
        "token": 9,
        "plain_token": 2,
        "gap": 0.5,
        "plain_gap": 0.25,
    }
    assert divergence(decoded_of([1], tokens=(1, 2)))["position"] == 2
