import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.config import OptimizerSection
from dflash_tools.train.schedule import learning_rate_at


@settings(deadline=None)
@given(
    st.integers(1, 400),
    st.floats(0, 1),
    st.sampled_from(["cosine", "linear", "constant"]),
)
def test_the_rate_rises_then_never_rises_again_and_stays_within_the_peak(num_steps, warmup_ratio, shape):
    settings = OptimizerSection(learning_rate=1e-3, warmup_ratio=warmup_ratio, lr_scheduler_type=shape)
    rates = [learning_rate_at(step, num_steps, settings) for step in range(num_steps)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 < rate <= 1e-3 for rate in rates)


def test_hand_values_of_warmup_and_each_shape():
    def rates(shape):
        settings = OptimizerSection(learning_rate=1.0, warmup_ratio=0.2, lr_scheduler_type=shape)
        return [learning_rate_at(step, 10, settings) for step in (0, 1, 2, 6, 9)]

    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.125])
    assert rates("cosine") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0380602])


def test_a_step_outside_the_plan_is_an_error():
    with pytest.raises(ValueError, match="outside a plan of 3 steps"):
        learning_rate_at(3, 3, OptimizerSection())
