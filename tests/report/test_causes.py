import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.report.causes import binomial_tail, near_marks, run_lengths_so_far


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_a_run_grows_by_one_and_starts_again_with_another_bucket(bucket_ids):
    expected, length = [], 0
    for place, bucket_id in enumerate(bucket_ids):
        length = length + 1 if place and bucket_ids[place - 1] == bucket_id else 1
        expected.append(length)
    assert run_lengths_so_far(np.array(bucket_ids)).tolist() == expected


def test_a_mark_is_near_itself_and_the_two_steps_after_it():
    marks = np.array([False, True, False, False, False, True])
    assert near_marks(marks).tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("at_least", "trials", "probability", "tail"),
    [(0, 5, 0.1, 1.0), (5, 5, 0.5, 1 / 32), (1, 2, 0.5, 0.75), (3, 3, 0.0, 0.0), (1, 1, 1.0, 1.0)],
)
def test_the_tail_of_a_binomial(at_least, trials, probability, tail):
    assert binomial_tail(at_least, trials, probability) == pytest.approx(tail)
