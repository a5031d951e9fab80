import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.plan.anchors import anchors_per_sample


def test_fixed_caps_every_sample():
    assert anchors_per_sample([0, 3, 10, 900], 10).tolist() == [0, 3, 10, 10]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200), st.integers(1, 600))
def test_proportional_gives_every_valid_anchor_the_same_share(valid, num_anchors):
    valid = np.array(valid)
    counts = anchors_per_sample(valid, num_anchors, "proportional")
    assert (counts <= valid).all()
    assert (counts[valid > 0] >= 1).all()
    share = min(1.0, num_anchors * len(valid) / max(valid.sum(), 1))
    assert np.all(np.abs(counts - share * valid) <= 1)


def test_proportional_gives_num_anchors_on_average():
    valid = np.random.default_rng(0).integers(1, 4000, 1000)
    assert anchors_per_sample(valid, 100, "proportional").mean() == pytest.approx(100, rel=0.01)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        anchors_per_sample([5], 0)
    with pytest.raises(ValueError, match="negative"):
        anchors_per_sample([-1], 4)
