import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.report import effects


def make_batches(number: int = 600, *, noise: float = 0.02, offsets=(0.0, 0.4, 0.9), seed: int = 0) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    bucket_ids = draws.integers(0, len(offsets), number)
    loss = 3 + 3 * np.exp(-np.arange(number) / 100) + np.asarray(offsets)[bucket_ids] + draws.normal(0, noise, number)
    return pl.DataFrame(
        {
            "batch": np.arange(number),
            "step": np.arange(number) // 2,
            "bucket_id": bucket_ids,
            "loss": loss,
            "label_weight": np.ones(number),
        }
    )


def test_groups_that_are_all_of_the_variance_explain_all_of_it():
    groups = np.repeat([0, 1, 2], 20)
    assert effects.explained_by_groups(groups * 1.5, groups).eta_squared == pytest.approx(1.0)


def test_groups_of_equal_means_explain_nothing():
    values = np.tile([1.0, -1.0], 30)
    assert effects.explained_by_groups(values, np.repeat([0, 1, 2], 20)).eta_squared == pytest.approx(0.0)


def test_groups_that_do_not_matter_explain_what_chance_says():
    draws = np.random.default_rng(0)
    explained = [
        effects.explained_by_groups(draws.normal(size=60), draws.integers(0, 6, 60)).eta_squared for _ in range(400)
    ]
    assert np.mean(explained) == pytest.approx(5 / 59, rel=0.1)


def test_a_curve_that_does_not_vary_has_no_share_to_explain():
    assert np.isnan(effects.explained_by_groups(np.ones(10), np.arange(10) % 2).eta_squared)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=8, max_size=60))
def test_with_one_batch_a_step_both_ways_to_explain_agree(pairs):
    groups, values = np.array([group for group, _ in pairs]), np.array([value for _, value in pairs])
    steps, shares = effects.step_shares(pl.DataFrame({"step": np.arange(len(groups)), "bucket_id": groups}))
    assert len(steps) == len(groups)
    assert shares.sum(axis=1) == pytest.approx(1.0)
    one, other = effects.explained_by_groups(values, groups), effects.explained_by_shares(values, shares)
    assert one.eta_squared_by_chance == other.eta_squared_by_chance
    assert one.eta_squared == pytest.approx(other.eta_squared, abs=1e-6, nan_ok=True)


def test_the_adjusted_loss_has_no_sawtooth():
    batches = effects.adjust_batches(make_batches())
    around = effects.around_trend(batches.get_column("adjusted_loss").to_numpy(), 30)
    raw = effects.around_trend(batches.get_column("loss").to_numpy(), 30)
    late = slice(200, None)
    assert np.std(around[late]) < 0.1 * np.std(raw[late])
    bucket_ids = batches.get_column("bucket_id").to_numpy()[late]
    assert effects.explained_by_groups(raw[late], bucket_ids).eta_squared > 0.9
    assert effects.explained_by_groups(around[late], bucket_ids).eta_squared < 0.1


@settings(max_examples=40)
@given(st.floats(-2, 2), st.floats(-2, 2))
def test_the_level_of_a_bucket_does_not_change_what_remains(first, second):
    plain = effects.adjust_batches(make_batches(300, offsets=(0, 0)))
    shifted = effects.adjust_batches(make_batches(300, offsets=(first, second)))
    gap = plain.get_column("residual").to_numpy()[100:] - shifted.get_column("residual").to_numpy()[100:]
    assert np.abs(gap).max() < 0.05 + 0.05 * abs(first - second)


def test_a_healthy_curve_has_no_reset():
    for seed in range(20):
        assert resets_of(make_batches(seed=seed)).is_empty()


@settings(max_examples=40)
@given(st.integers(60, 250), st.integers(1, 6), st.floats(0.6, 3.0))
def test_a_jump_is_one_reset_at_its_first_step_with_its_height(start, length, height):
    batches = make_batches().with_columns(
        loss=pl.col("loss") + pl.when(pl.col("step").is_between(start, start + length - 1)).then(height).otherwise(0.0)
    )
    resets = resets_of(batches)
    assert len(resets) == 1
    assert resets["first_step"][0] == start
    assert resets["last_step"][0] == start + length - 1
    assert resets["rise"][0] == pytest.approx(height, abs=0.25)


def test_batches_without_labels_and_losses_that_are_no_number_disturb_nothing():
    is_no_number, is_without_label = pl.col("batch") % 50 == 3, pl.col("batch") % 50 == 7
    batches = make_batches().with_columns(
        loss=pl.when(is_no_number).then(float("nan")).when(is_without_label).then(0.0).otherwise("loss"),
        label_weight=pl.when(is_without_label).then(0.0).otherwise("label_weight"),
    )
    assert resets_of(batches).is_empty()


def resets_of(batches: pl.DataFrame) -> pl.DataFrame:
    steps = effects.adjust_steps(effects.adjust_batches(batches))
    losses = batches.group_by("step", maintain_order=True).agg(pl.col("loss").mean()).get_column("loss").to_numpy()
    residuals = steps.get_column("residual").cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return effects.find_resets(steps.get_column("step").to_numpy(), residuals, losses)
