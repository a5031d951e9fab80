"""Every loss, from the stored last hidden state to the gradient of a step."""

import numpy as np
import pytest
import torch
from make_store import make_store

from dflash_tools.errors import StoreError
from dflash_tools.store.bf16 import from_bf16_bits
from dflash_tools.train.optimizer import trainable_parameters
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations, read_steps
from dflash_tools.train.setup import make_learner, make_setup, make_work
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


@pytest.fixture(scope="module")
def taught_store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("taught") / "store", validation_rows=(1, 5), last_hidden_state=True)


def prepare(config, store, run_dir):
    setup = make_setup(config, open_samples([store]), torch.device("cpu"), OneProcess(), None, run_dir)
    return make_learner(setup), make_work(setup)


@pytest.mark.parametrize("kind", ["ce", "dpace", "kd", "tv", "lk", "lk_hybrid"])
def test_every_loss_gives_a_finite_sum_and_a_gradient_of_every_weight(kind, taught_store, make_config, tmp_path):
    learner, work = prepare(make_config(loss__type=kind), taught_store, tmp_path)
    row = learner.make_table(1)[0]
    learner.accumulate(work.reader.read(work.request(0)), row)
    assert torch.isfinite(row).all()
    assert row[0] > 0
    for name, parameter in trainable_parameters(learner.model).items():
        assert float(parameter.grad.abs().max()) > 0, name


def test_the_teacher_of_slot_k_is_the_target_at_anchor_plus_k_minus_1(taught_store, make_config, tmp_path):
    """KL of a batch in plain NumPy from what the store holds."""
    learner, work = prepare(make_config(loss__type="kd", hardware__autocast="none"), taught_store, tmp_path)
    request = work.request(0)
    batch = work.reader.read(request)
    row = learner.make_table(1)[0]
    learner.measure(batch, row)
    frozen = learner._frozen
    head, norm = frozen.head.weight_VH.double().numpy(), frozen.norm_H.double().numpy()
    with torch.no_grad():
        hidden_ASH = learner.model(batch.context, batch.blocks, frozen.embedding_VH, "dense").double().numpy()

    def log_probabilities(state):
        logits = head @ state
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    expected, blocks = 0.0, batch.blocks
    for block, (document, anchor) in enumerate(
        zip(blocks.document_ids_A.tolist(), blocks.anchors_A.tolist(), strict=True)
    ):
        store, place = work.reader.samples.locate(int(request.rows[document]))
        last = from_bf16_bits(store.read([place])[0].last_hidden_state).astype(np.float64)
        for slot in range(1, int(blocks.supervised_A[block]) + 1):
            state = last[anchor + slot - 1]
            state = norm * state / np.sqrt(np.mean(state**2) + frozen.norm_eps)
            p, q = log_probabilities(state), log_probabilities(hidden_ASH[block, slot])
            expected += float(blocks.weights_AS[block, slot]) * float(np.sum(np.exp(p) * (p - q)))
    # The teacher's rows are rounded to bfloat16, as the target's head reads them.
    assert float(row[0]) == pytest.approx(expected, rel=1e-2)


def test_the_loss_that_is_trained_is_the_one_held_out_but_for_dpace(taught_store, make_config, tmp_path):
    found = {}
    for kind in ("ce", "dpace", "kd"):
        run_training(make_config(loss__type=kind, plan__max_steps=1), [taught_store], tmp_path / kind)
        found[kind] = read_evaluations(tmp_path / kind)[0].loss, read_steps(tmp_path / kind)[0]["loss"]
    assert found["dpace"][0] == found["ce"][0]
    assert found["dpace"][1] != found["ce"][1]
    assert found["kd"][0] != found["ce"][0]


def test_a_store_without_the_last_hidden_state_is_refused_for_distances_only(store_dir, make_config, tmp_path):
    with pytest.raises(StoreError, match=r'loss.type = "kd" needs.*store_last_hidden_state = true, or use "ce"'):
        run_training(make_config(loss__type="kd"), [store_dir], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prepare(make_config(loss__type="dpace"), store_dir, tmp_path)


def test_memory_read_ahead_counts_the_last_hidden_state(taught_store, make_config, tmp_path):
    _, with_it = prepare(make_config(loss__type="kd"), taught_store, tmp_path)
    _, without = prepare(make_config(), taught_store, tmp_path)
    request = without.request(0)
    extra = with_it.reader.num_bytes(request) - without.reader.num_bytes(request)
    assert extra == int(request.num_tokens.sum()) * 32 * 2
