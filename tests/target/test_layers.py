import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.errors import ConfigError
from dflash_tools.target.layers import choose_layers


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 1, (14,)),
        (2, 1, None),
        (3, 1, (1,)),
    ],
)
def test_the_formula_gives_the_layers_of_the_released_drafters(num_layers, num_features, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="no 1 distinct layers"):
            choose_layers("auto", num_features, num_layers)
    else:
        assert choose_layers("auto", num_features, num_layers) == expected


@given(st.integers(1, 80), st.integers(1, 12))
def test_chosen_layers_are_ascending_distinct_and_never_the_last(num_layers, num_features):
    """EX-05: tiny targets get usable layers or a clear refusal."""
    try:
        layer_ids = choose_layers("auto", num_features, num_layers)
    except ConfigError:
        assert num_layers < num_features + 3
        return
    assert len(layer_ids) == num_features
    assert list(layer_ids) == sorted(set(layer_ids))
    assert layer_ids[0] >= 0
    assert layer_ids[-1] <= num_layers - 2


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((0, 3), "3 is the last layer"),
        ((-1, 1), "-1 is not a decoder layer"),
        ((0, 4), "4 is not a decoder layer"),
        ((1, 1), "1 is listed more than once"),
        ((), "empty"),
    ],
)
def test_unusable_layers_are_refused_with_the_reason(layer_ids, message):
    """EX-04: an id outside 0..m-2 is never taken."""
    with pytest.raises(ConfigError, match=message):
        choose_layers(layer_ids, 5, 4)


def test_explicit_layers_keep_their_order():
    assert choose_layers((2, 0), 5, 4) == (2, 0)
