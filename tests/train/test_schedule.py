import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.config import OptimizerSection
from dflash_tools.train.schedule import schedule_factor


@settings(deadline=None)
@given(
    st.integers(1, 400),
    st.floats(0, 1),
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
)
def test_the_rate_rises_then_never_rises_again_and_stays_within_the_peak(num_steps, warmup_ratio, shape):
    settings = OptimizerSection(warmup_ratio=warmup_ratio, lr_scheduler_type=shape)
    rates = [schedule_factor(step, num_steps, settings) for step in range(num_steps)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 < rate <= 1 for rate in rates)


def test_hand_values_of_warmup_and_each_shape():
    def rates(shape):
        settings = OptimizerSection(warmup_ratio=0.2, lr_scheduler_type=shape)
        return [schedule_factor(step, 10, settings) for step in (0, 1, 2, 6, 9)]

    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.125])
    assert rates("cosine") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0380602])


def test_wsd_stays_at_the_peak_and_falls_over_its_last_share():
    settings = OptimizerSection(warmup_ratio=0.1, lr_scheduler_type="wsd", decay_ratio=0.4)
    rates = [schedule_factor(step, 10, settings) for step in range(10)]
    assert rates == pytest.approx([1.0] * 7 + [0.8535534, 0.5, 0.1464466])


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0, 1))
def test_wsd_that_decays_from_the_warmup_on_is_the_cosine(num_steps, warmup_ratio):
    wsd = OptimizerSection(warmup_ratio=warmup_ratio, lr_scheduler_type="wsd", decay_ratio=1.0)
    cosine = wsd.model_copy(update={"lr_scheduler_type": "cosine"})
    for step in range(num_steps):
        assert schedule_factor(step, num_steps, wsd) == schedule_factor(step, num_steps, cosine)


def test_a_longer_wsd_run_shares_its_steps_up_to_the_decay():
    """So it can be extended from a checkpoint before the decay, and the curve is that of the longer run."""
    settings = OptimizerSection(warmup_ratio=0.0, lr_scheduler_type="wsd", decay_ratio=0.25)
    short, long = ([schedule_factor(step, n, settings) for step in range(12)] for n in (16, 40))
    assert short == long == [1.0] * 12


def test_a_step_outside_the_plan_is_an_error():
    with pytest.raises(ValueError, match="outside a plan of 3 steps"):
        schedule_factor(3, 3, OptimizerSection())
