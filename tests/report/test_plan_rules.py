"""Every rule speaks up about the plan that has its fault, and all are silent about healthy ones."""

import numpy as np
import polars as pl
import pytest
from report.made import log_normal_lengths, make_index_store
from report.test_composition import plan_of_batches, samples_of

from dflash_tools.config import LossSection, PlanSettings, TrainConfig
from dflash_tools.errors import ConfigError
from dflash_tools.report import report_plan
from dflash_tools.report.composition import frame_of_plan
from dflash_tools.report.composition_sections import compose
from dflash_tools.report.order import order_facts
from dflash_tools.report.plan_rules import PlanFacts, plan_findings


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_samples", [1000, 5000])
def test_a_healthy_plan_has_no_diagnosis(tmp_path, num_samples, seed):
    store = make_index_store(tmp_path / "store", log_normal_lengths(num_samples, seed=seed))
    assert report_plan(TrainConfig(plan=PlanSettings(seed=seed, num_epochs=3)), [store]).diagnosis == ()


@pytest.mark.parametrize("strategy", ["shuffle", "sequential"])
def test_repeats_that_another_order_would_not_have_are_named_with_the_setting(store, strategy):
    (sentence, *_) = report_plan(TrainConfig(plan=PlanSettings(strategy=strategy)), [store]).diagnosis
    assert f"with `{strategy}`" in sentence
    assert 'plan.strategy = "interleave" would leave 0 repeats' in sentence


def test_a_bucket_that_no_order_can_hide_is_named(tmp_path):
    """PL-07: 98 % of the batches in one bucket."""
    lengths = np.concatenate([np.full(980, 700), np.full(20, 100)])
    store = make_index_store(tmp_path / "store", lengths, edges=[400, 800], num_validation=0)
    sentences = report_plan(TrainConfig(plan=PlanSettings(max_batch_size=1)), [store]).diagnosis
    assert any("even the best order repeats it" in sentence and "98%" in sentence for sentence in sentences)


def test_padding_is_named_with_its_bucket(tmp_path):
    lengths = np.concatenate([np.tile([10, 900], 400), np.full(100, 3000)])
    store = make_index_store(tmp_path / "store", lengths, edges=[1000, 4000], num_validation=0)
    sentences = report_plan(TrainConfig(plan=PlanSettings(sort_window=1)), [store]).diagnosis
    (sentence,) = [one for one in sentences if "are padding" in one]
    assert "most of it in bucket 0 (10 to 900 tokens)" in sentence
    assert "a full sort would leave" in sentence
    assert "plan.sort_window (now 1)" in sentence


def test_a_weight_of_tokens_that_differs_tenfold_is_named(tmp_path):
    lengths = np.concatenate([np.full(3000, 60), np.full(200, 8000)])
    store = make_index_store(tmp_path / "store", lengths, edges=[100, 8192])
    sentences = report_plan(TrainConfig(loss=LossSection(num_anchors=64)), [store]).diagnosis
    assert any("loss.anchor_rule" in sentence and "bucket 0 counts" in sentence for sentence in sentences)


def test_samples_that_teach_nothing_are_counted(tmp_path):
    store = make_index_store(tmp_path / "store", [1] * 50 + [400] * 200, edges=[800], num_validation=0)
    sentences = report_plan(TrainConfig(), [store]).diagnosis
    assert any("50 samples (20.0%) have no two supervised tokens in a row" in sentence for sentence in sentences)


def test_a_batch_of_many_blocks_is_named_with_a_budget(tmp_path):
    lengths = np.concatenate([np.full(64, 250), np.full(200, 8000)])
    store = make_index_store(tmp_path / "store", lengths, edges=[300, 8192], num_validation=0)
    sentences = report_plan(TrainConfig(), [store]).diagnosis
    assert any("plan.anchor_budget" in sentence for sentence in sentences)


def test_an_empty_training_split_is_refused(tmp_path):
    store = make_index_store(tmp_path / "store", [100] * 4, edges=[200], num_validation=4)
    with pytest.raises(ConfigError, match="no training sample"):
        report_plan(TrainConfig(), [store])


def test_padding_that_no_window_saves_asks_for_other_buckets(tmp_path):
    store = make_index_store(tmp_path / "store", log_normal_lengths(300))
    (sentence,) = report_plan(TrainConfig(), [store]).diagnosis
    assert "a full sort would still leave" in sentence
    assert "plan.sort_window" not in sentence


def test_a_share_that_drifts_through_the_epoch_is_named(tmp_path):
    """PL-07: a draw in proportion to what is left, never the bucket just used, holds a large bucket back at first."""
    lengths = np.concatenate([np.full(450, 3000), *(np.full(110, 100 * (b + 1)) for b in range(5))])
    store = make_index_store(tmp_path / "store", lengths, edges=[100, 200, 300, 400, 500, 3000], num_validation=0)
    sentences = report_plan(
        TrainConfig(plan=PlanSettings(strategy="weighted", max_batch_size=1, num_epochs=4)), [store]
    ).diagnosis
    assert any("of the first tenth of an epoch" in sentence and "Bucket 5" in sentence for sentence in sentences)


def test_lengths_that_drift_without_repeats_are_named():
    """Neighbouring batches of different buckets, yet of slowly changing length."""
    number = 600
    lengths = (1000 + 900 * np.sin(np.arange(number) / 40)).astype(int)
    plan = plan_of_batches([[row] for row in range(number)], np.arange(number) % 2)
    whole = compose(frame_of_plan(plan, samples_of(lengths, np.arange(number) % 2)))
    facts = PlanFacts(
        composition=whole,
        order=order_facts(plan),
        settings=PlanSettings(batches_per_step=1),
        weights=pl.DataFrame(schema={"num_valid_anchors": pl.Int64, "token_weight": pl.Float64}),
        limits=pl.DataFrame({"bucket_id": [0], "share_ended_by_batch_size": [0.0], "mean_padded_tokens": [9]}),
        left_out={"too_long": 30},
        num_without_anchor=0,
        sorted_efficiency=1.0,
    )
    findings = {finding.rule: finding.sentence for finding in plan_findings(facts)}
    assert set(findings) == {"positive_correlation", "left_out"}
    assert "+1.00" in findings["positive_correlation"]
    assert findings["left_out"] == "30 training samples are in no batch (too_long: 30)."
