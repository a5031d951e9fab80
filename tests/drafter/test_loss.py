import numpy as np
import pytest
import torch
from drafter.random_batch import VOCAB_SIZE, Batch, make_batch, make_config, make_drafter
from torch.nn import functional as F

from dflash_tools.drafter import loss as loss_module
from dflash_tools.drafter.blocks import build_blocks
from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.loss import Objective, block_loss, cross_entropy_rows, dpace_weights


def plain_loss(hidden_ASH: torch.Tensor, batch: Batch, head: Head, gamma: float) -> torch.Tensor:
    """The formula slot by slot, from the samples themselves."""
    total = torch.zeros((), dtype=torch.float64)
    blocks = batch.blocks
    for i in range(len(blocks)):
        document, anchor = int(blocks.document_ids_A[i]), int(blocks.anchors_A[i])
        ids, mask = batch.input_ids[document], batch.loss_masks[document]
        for slot in range(1, blocks.block_size):
            if anchor + slot >= len(ids) or not mask[anchor + slot]:
                break
            logits = head.weight_VH.double() @ hidden_ASH[i, slot].double() * head.scale
            if head.bias_V is not None:
                logits = logits + head.bias_V.double() * head.scale
            if head.softcap is not None:
                logits = head.softcap * torch.tanh(logits / head.softcap)
            loss = torch.logsumexp(logits, 0) - logits[int(ids[anchor + slot])]
            total = total + np.exp(-(slot - 1) / gamma) * loss
    return total


def heads(batch: Batch) -> dict[str, Head]:
    weight = batch.head.weight_VH
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    return {
        "plain": batch.head,
        "bias": Head(weight_VH=weight, bias_V=bias),
        "scaled and capped": Head(weight_VH=weight, bias_V=bias, scale=0.7, softcap=3.0),
    }


@pytest.mark.parametrize("kind", ["plain", "bias", "scaled and capped"])
@pytest.mark.parametrize("chunk_rows", [3, 512])
def test_loss_and_gradient_equal_the_plain_formula(monkeypatch, kind, chunk_rows):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk_rows)
    batch = make_batch(make_config(), lengths=(20, 13, 7), supervised_share=0.8, gamma=2.5)
    head = heads(batch)[kind]
    hidden = torch.randn(*batch.blocks.ids_AS.shape, 16, dtype=torch.float64).requires_grad_()
    sums = block_loss(hidden, batch.blocks, head)
    (gradient,) = torch.autograd.grad(3 * sums.weighted_sum, hidden)
    expected = plain_loss(hidden, batch, head, gamma=2.5)
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)
    # The slot weights are kept in float32.
    assert sums.weighted_sum.item() == pytest.approx(expected.item(), rel=1e-7)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_the_plain_formula(dtype):
    batch = make_batch(make_config(), dtype=dtype)
    hidden = (0.3 * torch.randn(*batch.blocks.ids_AS.shape, 16)).to(dtype).requires_grad_()
    sums = block_loss(hidden, batch.blocks, batch.head)
    (gradient,) = torch.autograd.grad(sums.weighted_sum, hidden)
    expected = plain_loss(hidden, batch, batch.head, gamma=4.0)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert sums.weighted_sum.dtype == torch.float32
    assert gradient.dtype == dtype
    assert sums.weighted_sum.item() == pytest.approx(expected.item(), rel=tolerance)
    assert float((gradient.float() - expected_gradient.float()).norm() / expected_gradient.float().norm()) < tolerance


def test_the_gradient_of_a_confident_row_survives_bfloat16():
    generator = torch.Generator().manual_seed(0)
    weight_VH = (0.05 * torch.randn(20_000, 16, generator=generator)).to(torch.bfloat16)
    labels_N = torch.arange(4)
    weight_VH[labels_N] = torch.eye(16, dtype=torch.bfloat16)[:4]
    hidden_NH = (17.0 * torch.eye(16)[:4]).to(torch.bfloat16).requires_grad_()
    head = Head(weight_VH=weight_VH)
    losses_N, _ = cross_entropy_rows(hidden_NH, labels_N, head)
    (gradient_NH,) = torch.autograd.grad(losses_N.sum(), hidden_NH)
    expected_NV = head.logits(hidden_NH.detach()).double().softmax(dim=-1)
    assert expected_NV[torch.arange(4), labels_N].tolist() == pytest.approx([0.999] * 4, abs=8e-4)
    expected_NV[torch.arange(4), labels_N] -= 1
    expected_NH = expected_NV @ weight_VH.double()
    assert float((gradient_NH.double() - expected_NH).norm() / expected_NH.norm()) < 1e-2


def test_the_sum_and_its_gradient_do_not_depend_on_the_cut_into_batches():
    config = make_config()
    model = make_drafter(config)
    whole = make_batch(config, lengths=(15, 11, 8))

    def gradients(document_groups):
        model.zero_grad()
        total = 0.0
        starts = np.cumsum([0, 15, 11, 8])
        for group in document_groups:
            context, blocks = part_of(whole, group, starts, config)
            sums = block_loss(model(context, blocks, whole.embedding_VH, "split"), blocks, whole.head)
            sums.weighted_sum.backward()
            total += sums.weighted_sum.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])

    total, gradient = gradients([[0, 1, 2]])
    for groups in ([[0], [1], [2]], [[2, 0], [1]]):
        other_total, other_gradient = gradients(groups)
        assert other_total == pytest.approx(total, rel=1e-12)
        assert torch.allclose(other_gradient, gradient, rtol=1e-9, atol=1e-10)


def part_of(whole, group, starts, config):
    from dflash_tools.drafter.blocks import build_context

    rows = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in group])
    states = whole.context.hidden_states_TKH[torch.from_numpy(rows)]
    picked = [[column[d] for d in group] for column in (whole.input_ids, whole.loss_masks, whole.anchors)]
    context = build_context(states, [len(ids) for ids in picked[0]])
    return context, build_blocks(*picked, block_size=config.block_size, mask_token_id=config.mask_token_id, gamma=4.0)


def test_a_batch_without_anchors_gives_zero_and_a_zero_gradient():
    """TN-01."""
    config = make_config()
    model = make_drafter(config)
    batch = make_batch(config, supervised_share=0.0)
    for path in ("dense", "split"):
        model.zero_grad()
        sums = block_loss(model(batch.context, batch.blocks, batch.embedding_VH, path), batch.blocks, batch.head)
        sums.weighted_sum.backward()
        assert sums.weighted_sum.item() == 0.0
        assert sums.label_weight == 0.0
        assert sums.count_by_slot.tolist() == [0, 0, 0]
        for parameter in model.parameters():
            assert parameter.grad is None or not parameter.grad.any()


def test_right_guesses_are_counted_at_supervised_slots_only():
    batch = make_batch(make_config(), lengths=(12,), num_anchors=11)
    blocks = batch.blocks
    hidden = torch.zeros(*blocks.ids_AS.shape, 16, dtype=torch.float64)
    hidden[:] = batch.embedding_VH[5]  # every slot guesses the token that this row of the head likes best
    guess = int((batch.embedding_VH @ batch.embedding_VH[5]).argmax())
    sums = block_loss(hidden, blocks, batch.head)
    assert torch.equal(sums.correct_AS, blocks.labels_AS == guess)
    assert sums.count_by_slot.tolist() == [11, 10, 9]
    assert sums.correct_by_slot.tolist() == (blocks.labels_AS == guess)[:, 1:].sum(0).tolist()
    assert float(sums.loss_A.sum()) == pytest.approx(sums.weighted_sum.item())


def test_logits_exist_for_one_chunk_of_rows_only_and_none_are_kept(monkeypatch):
    """Peak memory does not grow with vocabulary x anchors."""
    made, kept = [], []
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 10)

    class WatchedHead(Head):
        def logits(self, hidden_NH):
            logits_NV = Head.logits(self, hidden_NH)
            made.append(logits_NV.shape)
            return logits_NV

    batch = make_batch(make_config(), lengths=(40,), num_anchors=39)
    hidden = torch.randn(*batch.blocks.ids_AS.shape, 16).requires_grad_()
    head = WatchedHead(weight_VH=batch.embedding_VH.float())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        sums = block_loss(hidden, batch.blocks, head)
    sums.weighted_sum.backward()
    assert sum(shape[0] for shape in made) == batch.blocks.num_slots
    assert max(shape[0] for shape in made) == 10
    assert kept
    assert all(VOCAB_SIZE not in shape for shape in kept)


def test_dpace_weighs_each_slot_as_the_plain_formula_does():
    alpha = 0.5
    batch = make_batch(make_config(), lengths=(20, 13, 7), supervised_share=0.8)
    hidden = torch.randn(*batch.blocks.ids_AS.shape, 16, dtype=torch.float64).requires_grad_()
    sums = block_loss(hidden, batch.blocks, batch.head, Objective(type="dpace", dpace_alpha=alpha))
    (gradient,) = torch.autograd.grad(sums.weighted_sum, hidden)
    losses = F.cross_entropy(
        (hidden @ batch.embedding_VH.T).flatten(0, 1), batch.blocks.labels_AS.flatten(), reduction="none"
    ).view(batch.blocks.ids_AS.shape)
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for i, supervised in enumerate(batch.blocks.supervised_A.tolist()):
        reached = np.cumprod([(1 - alpha) * np.exp(-losses[i, s].item()) + alpha for s in range(1, supervised + 1)])
        for slot in range(1, supervised + 1):
            weight = reached[slot - 1 :].sum()
            total, weight_sum = total + weight * losses[i, slot], weight_sum + weight
    (expected_gradient,) = torch.autograd.grad(total, hidden)
    assert sums.weighted_sum.item() == pytest.approx(total.item(), rel=1e-12)
    assert sums.label_weight == pytest.approx(weight_sum, rel=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_dpace_with_certain_guesses_weighs_slots_by_what_is_left_of_the_block():
    weights = dpace_weights(torch.zeros(1, 4), torch.tensor([[False, True, True, False]]), 0.3)
    assert weights.tolist() == [[0, 2, 1, 0]]
