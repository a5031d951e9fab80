import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data import choose_split
from dflash_tools.errors import DataError


def names(count):
    return [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(count)]


def test_about_the_wanted_share_is_held_out():
    held_out = choose_split(names(4000), 0.1)
    assert 0.08 < held_out.mean() < 0.12


def test_the_choice_of_a_conversation_does_not_depend_on_the_others():
    all_names = names(500)
    whole = dict(zip(all_names, choose_split(all_names, 0.2), strict=True))
    assert all(
        whole[name] == held for name, held in zip(all_names[::3], choose_split(all_names[::3], 0.2), strict=True)
    )


@given(st.lists(st.integers(0, 30), max_size=80), st.floats(0, 0.99), st.integers(0, 20))
def test_samples_of_a_conversation_fall_on_one_side_and_the_minimum_is_reached(numbers, fraction, minimum):
    ids = [names(31)[number] for number in numbers]
    try:
        held_out = choose_split(ids, fraction, minimum)
    except DataError:
        assert len(set(ids)) <= minimum
        return
    assert len(held_out) == len(ids)
    assert not {name for name, held in zip(ids, held_out, strict=True) if held} & {
        name for name, held in zip(ids, held_out, strict=True) if not held
    }
    assert held_out.sum() >= minimum or not ids
    assert np.array_equal(choose_split(ids[::-1], fraction, minimum)[::-1], held_out)


def test_a_minimum_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(DataError, match="lower it or add data"):
        choose_split(names(8), 0.1, 8)
