"""Numbers that must not depend on how work is cut, watched or interrupted."""

import math

import numpy as np
import pytest
import torch
from make_store import make_store

from dflash_tools.contracts.run_folder import find_checkpoint, list_checkpoints
from dflash_tools.errors import StoreError, UserError
from dflash_tools.train.checkpoint import NonFiniteWeightsError, load_checkpoint
from dflash_tools.train.optimizer import trainable_parameters
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations, read_steps
from dflash_tools.train.setup import make_learner, make_setup, make_work
from dflash_tools.train.step import Learner
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


def prepare(config, stores, run_dir):
    setup = make_setup(config, open_samples(stores), torch.device("cpu"), OneProcess(), None, run_dir)
    return make_learner(setup), make_work(setup)


def gradient_of(config, store_dir, tmp_path, cuts):
    """Gradient and loss of all training samples as one step, in batches of the given sizes."""
    learner, work = prepare(config, [store_dir], tmp_path)
    rows = work.reader.samples.columns.is_training.nonzero()[0]
    gradient, loss_sum, weight = 0.0, 0.0, 0.0
    for part in np.split(rows, np.cumsum(cuts)[:-1]):
        request = work.request(0).__class__(
            batch=0,
            bucket_id=0,
            epoch=0,
            rows=part,
            num_anchors=work.anchors_of_row[part],
            num_tokens=work.reader.samples.num_tokens[part],
        )
        row = learner.make_table(1)[0]
        learner.accumulate(work.reader.read(request), row)
        loss_sum, weight = loss_sum + float(row[0]), weight + float(row[1])
    gradient = torch.cat([p.grad.flatten() for p in trainable_parameters(learner.model).values()])
    return gradient / weight, loss_sum / weight


@pytest.mark.parametrize("cuts", [[1] * 10, [5, 5], [1, 9], [3, 3, 4]])
def test_a_step_has_the_same_loss_and_gradient_however_it_is_cut(cuts, store_dir, make_config, tmp_path):
    config = make_config(hardware__autocast="none")
    whole, loss = gradient_of(config, store_dir, tmp_path, [10])
    gradient, cut_loss = gradient_of(config, store_dir, tmp_path, cuts)
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()) + 1e-8)


@pytest.mark.parametrize(
    "watching",
    [
        {"evaluation__eval_steps": 1},
        {"evaluation__eval_steps": 10**6, "checkpoint__save_steps": 10**6},
        {"checkpoint__save_steps": 1, "checkpoint__save_total_limit": 1},
        {"evaluation__num_anchors": 1, "evaluation__max_samples": 1},
        {"hardware__prefetch_bytes": 1},
    ],
)
def test_evaluating_saving_and_reading_ahead_never_change_the_weights(
    watching, store_dir, make_config, straight_run, end_state, tmp_path
):
    run_training(make_config(**watching), [store_dir], tmp_path / "run")
    assert end_state(tmp_path / "run")["tensors"] == end_state(straight_run)["tensors"]
    assert end_state(tmp_path / "run")["log"] == end_state(straight_run)["log"]


def test_every_weight_moves_in_bfloat16_norms_too(store_dir, make_config, straight_run, tmp_path):
    """TN-02: masters and moments are float32, so that small updates of weights near 1 are not rounded away."""
    learner, _ = prepare(make_config(), [store_dir], tmp_path)
    fresh = learner.model.state_dict()
    trained, moments = load_checkpoint(find_checkpoint(straight_run, "latest")[0])
    assert {tensor.dtype for tensor in (*trained.values(), *moments.values())} == {torch.float32}
    for name, tensor in trained.items():
        assert float((tensor - fresh[name]).abs().max()) > 1e-4, name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


def poison(monkeypatch, is_sick):
    """Make the gradient of some updates infinite."""
    update = Learner.update
    calls = []

    def sick(self, label_weight, factor):
        calls.append(None)
        if is_sick(len(calls) - 1):
            self._gradient[0] = math.inf
        return update(self, label_weight, factor)

    monkeypatch.setattr(Learner, "update", sick)


def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_moments_and_count(
    store_dir, make_config, tmp_path, monkeypatch
):
    """TN-05."""
    config = make_config(plan__num_epochs=2)
    poison(monkeypatch, lambda step: step == 3)
    run_training(config, [store_dir], tmp_path / "run")
    monkeypatch.undo()
    run_training(make_config(plan__num_epochs=2, checkpoint__save_steps=3), [store_dir], tmp_path / "healthy")
    sick = load_checkpoint(find_checkpoint(tmp_path / "run", "latest")[0])
    healthy = load_checkpoint(find_checkpoint(tmp_path / "healthy", "3")[0])
    for found, expected in zip(sick, healthy, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    state = find_checkpoint(tmp_path / "run", "latest")[1]
    assert (state.step, state.skipped_steps, state.consecutive_skipped_steps) == (4, 1, 1)
    records = read_steps(tmp_path / "run")
    assert [record["skipped"] for record in records.values()] == [False, False, False, True]
    assert records[3]["grad_norm"] is None


def test_ten_skipped_steps_in_a_row_end_the_run_and_name_the_batches(store_dir, make_config, tmp_path, monkeypatch):
    poison(monkeypatch, lambda step: step >= 1)
    config = make_config(plan__num_epochs=9)
    with pytest.raises(UserError) as stop:
        run_training(config, [store_dir], tmp_path / "run")
    assert "10 steps in a row had gradients that are not finite, the last one step 10" in str(stop.value)
    assert "No update was made since step 1" in str(stop.value)
    assert "batch 20 (samples " in str(stop.value)


def test_weights_that_turn_nan_end_the_run_and_healthy_checkpoints_stay(store_dir, make_config, tmp_path, monkeypatch):
    """TN-04."""
    update = Learner.update

    def turn_nan(self, label_weight, factor):
        result = update(self, label_weight, factor)
        if self.optimizer.num_updates == 5:
            with torch.no_grad():
                self.model.norm.weight[0] = math.nan
        return result

    monkeypatch.setattr(Learner, "update", turn_nan)
    config = make_config(plan__num_epochs=4, checkpoint__save_total_limit=1, evaluation__eval_steps=10**6)
    with pytest.raises(NonFiniteWeightsError, match=r"norm.weight holds NaN.*last healthy checkpoint is step 4"):
        run_training(config, [store_dir], tmp_path / "run")
    assert list(list_checkpoints(tmp_path / "run")) == [4]


def test_held_out_figures_are_those_of_fixed_anchors_whatever_the_batches(store_dir, make_config, tmp_path):
    for name, budget in (("wide", 128), ("narrow", 64)):
        config = make_config(plan__max_steps=1, plan__token_budget=budget, hardware__autocast="none")
        run_training(config, [store_dir], tmp_path / name)
    wide, narrow = (read_evaluations(tmp_path / name)[0] for name in ("wide", "narrow"))
    assert wide.count_by_slot == narrow.count_by_slot
    assert wide.num_samples == narrow.num_samples == 2
    assert wide.loss == pytest.approx(narrow.loss, rel=1e-6)
    assert sum(bucket.num_blocks for bucket in wide.by_bucket) == wide.num_blocks
    weights = [bucket.num_samples for bucket in wide.by_bucket]
    assert sum(weights) == 2


def test_real_padded_and_supervised_tokens_are_counted_apart(tmp_path, make_config):
    """LG-05: lengths 10, 10 and 5 are 25 of 30, whatever is computed."""
    store = make_store(tmp_path / "store", lengths=(10, 10, 5), edges=(16,))
    run_training(make_config(plan__max_steps=1), [store], tmp_path / "run")
    record = read_steps(tmp_path / "run")[0]
    assert (record["num_tokens"], record["num_padded_tokens"]) == (25, 30)
    assert record["padding_efficiency"] == 25 / 30
    assert record["num_supervised_tokens"] == 7 + 7 + 4
    assert read_evaluations(tmp_path / "run") == {}


def test_two_stores_are_one_run_and_another_target_is_refused(store_dir, make_config, tmp_path):
    more = make_store(tmp_path / "more", lengths=(11, 30, 8), validation_rows=(0,), seed=0)
    summary = run_training(make_config(plan__num_epochs=1), [store_dir, more], tmp_path / "run")
    rows = sum(b["batch_size"] for record in read_steps(tmp_path / "run").values() for b in record["batches"])
    assert rows == 10 + 2
    assert summary["loss_after"] is not None
    other = make_store(tmp_path / "other", num_layers=2, seed=7)
    with pytest.raises(StoreError) as refusal:
        run_training(make_config(), [store_dir, other], tmp_path / "refused")
    assert "target_layer_ids is (1, 2), not (1, 2, 3)" in str(refusal.value)
    assert "embedding and head" in str(refusal.value)
    with pytest.raises(StoreError, match="give each store once"):
        run_training(make_config(), [store_dir, store_dir], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_subset_of_the_stored_layers_reads_the_right_columns(store_dir, make_config, tmp_path):
    _, work = prepare(make_config(drafter__target_layer_ids=(3, 1)), [store_dir], tmp_path)
    _, whole = prepare(make_config(), [store_dir], tmp_path)
    request = work.request(0)
    part, full = work.reader.read(request), whole.reader.read(request)
    states, all_states = part.context.hidden_states_TKH, full.context.hidden_states_TKH
    assert torch.equal(states, all_states[:, [2, 0]])


def test_a_damaged_sample_ends_the_run_and_nothing_takes_its_place(make_config, tmp_path):
    """TN-13."""
    store = make_store(tmp_path / "store", lengths=(20, 30, 25))
    shard = max((store / "buckets").rglob("hidden_states/c.*"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[10] ^= 255
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=r"sample [0-9a-f]{32}.*verify"):
        run_training(make_config(), [store], tmp_path / "run")


def test_dry_run_tells_what_a_run_takes_and_writes_nothing(store_dir, make_config, straight_run, tmp_path):
    result = run_training(make_config(), [store_dir], tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    assert (result["steps"], result["epochs"], result["samples_per_epoch"]) == (6, 3, 10)
    assert result["held_out_samples"] == 2
    # Weight, gradient and two moments in float32, and one count a tensor.
    assert result["memory_bytes"]["weights_gradients_moments"] == pytest.approx(16 * result["num_parameters"], rel=0.01)
    assert result["needed_bytes_per_second"] > 0
    assert result["probed_read_bytes_per_second"] > 0
    assert [batch["batch"] for batch in result["first_batches"]] == [0, 1, 2, 3, 4]
    weights = load_checkpoint(find_checkpoint(straight_run, "latest")[0])[0]
    assert result["num_parameters"] == sum(tensor.numel() for tensor in weights.values())


@pytest.mark.slow
def test_training_overfits_one_sample_to_whole_blocks(tmp_path, make_config):
    """TN-08: slot k has the token at anchor + k, so a drafter that knows the text by heart drafts whole blocks."""
    store = make_store(tmp_path / "store", lengths=(24, 24), validation_rows=(), edges=(24,))
    config = make_config(
        plan__num_epochs=150, plan__batches_per_step=1, optimizer__learning_rate=3e-3, loss__num_anchors=64
    )
    run_training(config, [store], tmp_path / "run")
    last = list(read_steps(tmp_path / "run").values())[-1]
    assert set(last["accuracy_by_slot"]) == {1.0}
    assert last["acceptance_length"] == 4.0
