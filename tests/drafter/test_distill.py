import numpy as np
import pytest
import torch
from drafter.random_batch import Batch, make_batch, make_config
from torch.nn import functional as F

from dflash_tools.drafter import distill
from dflash_tools.drafter.distill import teacher_rows
from dflash_tools.drafter.frozen import FrozenTarget, Head
from dflash_tools.drafter.loss import Objective, block_loss
from dflash_tools.errors import StoreError

GAMMA = 2.5


def plain_distance(kind: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    kl = (p * (p / q).log()).sum()
    tv = (p - q).abs().sum() / 2
    acceptance = torch.minimum(p, q).sum()
    share = torch.exp(-3 * acceptance).detach()
    return {"kd": kl, "tv": tv, "lk": -acceptance.log(), "lk_hybrid": share * kl + (1 - share) * tv}[kind]


def plain_loss(kind: str, hidden_ASH: torch.Tensor, last_TH: torch.Tensor, batch: Batch, frozen: FrozenTarget):
    """Slot by slot: the teacher of slot k is the target's distribution at position anchor + k - 1."""
    total = torch.zeros((), dtype=torch.float64)
    blocks, head = batch.blocks, frozen.head
    for i in range(len(blocks)):
        document, anchor = int(blocks.document_ids_A[i]), int(blocks.anchors_A[i])
        start, mask = batch.context.offsets[document], batch.loss_masks[document]
        for slot in range(1, blocks.block_size):
            if anchor + slot >= len(mask) or not mask[anchor + slot]:
                break
            state = last_TH[start + anchor + slot - 1]
            normed = state / (state.square().mean() + frozen.norm_eps).sqrt() * frozen.norm_H
            p, q = (head.logits(row).softmax(-1) for row in (normed, hidden_ASH[i, slot]))
            total = total + np.exp(-(slot - 1) / GAMMA) * plain_distance(kind, p, q)
    return total


def make_case(dtype=torch.float64, softcap=None):
    batch = make_batch(make_config(), lengths=(20, 13), supervised_share=0.8, gamma=GAMMA, dtype=dtype, padding=2)
    generator = torch.Generator().manual_seed(7)
    last_TH = torch.randn(35, 16, generator=generator, dtype=dtype) * 3
    norm_H = torch.rand(16, generator=generator, dtype=dtype) * 0.5 + 0.1
    frozen = FrozenTarget(
        embedding_VH=batch.embedding_VH,
        head=Head(weight_VH=batch.embedding_VH, softcap=softcap),
        norm_H=norm_H,
        norm_bias=False,
        norm_eps=1e-5,
    )
    hidden = torch.randn(*batch.blocks.ids_AS.shape, 16, generator=generator, dtype=dtype) * 0.3
    return batch, last_TH, frozen, hidden.requires_grad_()


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("kind", ["kd", "tv", "lk", "lk_hybrid"])
def test_each_distance_and_its_gradient_equal_the_plain_formula(monkeypatch, kind, softcap):
    monkeypatch.setattr(distill, "CHUNK_ROWS", 7)
    batch, last_TH, frozen, hidden = make_case(softcap=softcap)
    teacher = teacher_rows(last_TH, batch.context, batch.blocks, frozen, normed=False)
    sums = block_loss(hidden, batch.blocks, frozen.head, Objective(type=kind), teacher)
    (gradient,) = torch.autograd.grad(sums.weighted_sum, hidden)
    expected = plain_loss(kind, hidden, last_TH, batch, frozen)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    # The norm is applied in float32, and slot weights are kept in float32.
    assert sums.weighted_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert sums.label_weight == batch.blocks.label_weight


@pytest.mark.parametrize("kind", ["kd", "tv", "lk", "lk_hybrid"])
def test_bfloat16_stays_near_the_plain_formula(kind):
    batch, last_TH, frozen, hidden = make_case()
    expected = plain_loss(kind, hidden, last_TH, batch, frozen)
    head = Head(weight_VH=frozen.head.weight_VH.bfloat16())
    teacher = teacher_rows(last_TH.bfloat16(), batch.context, batch.blocks, frozen, normed=False)
    rough = hidden.detach().bfloat16().requires_grad_()
    sums = block_loss(rough, batch.blocks, head, Objective(type=kind), teacher)
    sums.weighted_sum.backward()
    assert sums.weighted_sum.item() == pytest.approx(expected.item(), rel=2e-2)
    assert rough.grad.isfinite().all()


def test_a_drafter_that_equals_the_target_has_no_loss_and_no_gradient():
    batch, last_TH, frozen, _ = make_case()
    teacher = teacher_rows(last_TH, batch.context, batch.blocks, frozen, normed=False)
    hidden = torch.zeros(*batch.blocks.ids_AS.shape, 16, dtype=torch.float64)
    hidden[batch.blocks.labels_AS >= 0] = teacher
    for kind in ("kd", "tv", "lk", "lk_hybrid"):
        hidden = hidden.detach().requires_grad_()
        sums = block_loss(hidden, batch.blocks, frozen.head, Objective(type=kind), teacher)
        sums.weighted_sum.backward()
        assert abs(sums.weighted_sum.item()) < 1e-12
        assert hidden.grad.abs().max() < 1e-12


def test_states_after_the_norm_are_taken_as_they_are():
    batch, last_TH, frozen, _ = make_case()
    normed = F.rms_norm(last_TH.float(), (16,), frozen.norm_H.float(), frozen.norm_eps).double()
    before = teacher_rows(last_TH, batch.context, batch.blocks, frozen, normed=False)
    after = teacher_rows(normed, batch.context, batch.blocks, frozen, normed=True)
    assert torch.equal(before, after)


def test_a_target_without_an_rms_norm_is_refused():
    batch, last_TH, frozen, _ = make_case()
    other = FrozenTarget(
        embedding_VH=frozen.embedding_VH, head=frozen.head, norm_H=frozen.norm_H, norm_bias=True, norm_eps=1e-5
    )
    with pytest.raises(StoreError, match="not an RMS norm"):
        teacher_rows(last_TH, batch.context, batch.blocks, other, normed=False)


def test_a_distance_without_a_teacher_is_refused():
    batch, _, frozen, hidden = make_case()
    with pytest.raises(ValueError, match="loss type kd needs the rows of the teacher"):
        block_loss(hidden, batch.blocks, frozen.head, Objective(type="kd"))
