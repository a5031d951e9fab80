import math

import pytest
import torch
from drafter.random_batch import make_batch, make_config, make_drafter, make_sliding_config, with_states
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.drafter import attention_split
from dflash_tools.drafter.attention_dense import make_dense_attend
from dflash_tools.drafter.attention_flex import make_flex_attend
from dflash_tools.drafter.attention_split import make_split_attend


def plain_attention(batch, window, q_ASQD, ck, cv, bk, bv):
    """The laws of the mask written out for one slot at a time."""
    out = torch.zeros_like(q_ASQD)
    blocks, context = batch.blocks, batch.context
    repeat = q_ASQD.shape[2] // ck.shape[1]
    for i in range(len(blocks)):
        document, anchor = int(blocks.document_ids_A[i]), int(blocks.anchors_A[i])
        start = context.offsets[document]
        for j in range(blocks.block_size):
            low = 0 if window is None else max(0, anchor + j - (window - 1))
            last_slot = blocks.block_size if window is None else j + 1
            first_slot = 0 if window is None else max(0, j - (window - 1))
            keys = torch.cat((ck[start + low : start + max(anchor, low)], bk[i, first_slot:last_slot]))
            values = torch.cat((cv[start + low : start + max(anchor, low)], bv[i, first_slot:last_slot]))
            for head in range(q_ASQD.shape[2]):
                scores = keys[:, head // repeat] @ q_ASQD[i, j, head] / math.sqrt(q_ASQD.shape[3])
                out[i, j, head] = scores.softmax(0) @ values[:, head // repeat]
    return out


def random_heads(batch, requires_grad=True):
    generator = torch.Generator().manual_seed(3)
    num_blocks, block_size = batch.blocks.ids_AS.shape
    num_tokens = len(batch.context.positions_T)
    shapes = [(num_blocks, block_size, 4, 8)] + [(num_tokens, 2, 8)] * 2 + [(num_blocks, block_size, 2, 8)] * 2
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for shape in shapes
    ]


def attend_of(path, batch, window):
    if path == "dense":
        return make_dense_attend(batch.context, batch.blocks, window)
    if path == "split":
        return make_split_attend(batch.context, batch.blocks, 4, window)
    return make_flex_attend(batch.context, batch.blocks, window)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("path", ["dense", "split"])
def test_each_path_and_its_gradients_equal_attention_written_out_slot_by_slot(monkeypatch, path, window):
    monkeypatch.setattr(attention_split, "MIN_CHUNK_BLOCKS", 2)
    monkeypatch.setattr(attention_split, "CHUNK_SCORES", 1)
    batch = make_batch(make_config(), lengths=(14, 1, 9), num_anchors=5, padding=3)
    inputs = random_heads(batch)
    slides = window is not None
    found = attend_of(path, batch, window)(*inputs, slides)
    expected = plain_attention(batch, window, *inputs)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_the_flex_path_equals_attention_written_out_slot_by_slot(window):
    batch = make_batch(make_config(), lengths=(14, 9), num_anchors=5, padding=3)
    inputs = random_heads(batch, requires_grad=False)
    found = attend_of("flex", batch, window)(*inputs, window is not None)
    assert torch.allclose(found, plain_attention(batch, window, *inputs), rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([None, 2, 7, 20]),
    st.integers(0, 10**6),
)
def test_split_equals_dense_for_any_lengths_and_anchors(lengths, num_anchors, window, seed):
    """TN-07, TN-10."""
    batch = make_batch(make_config(), lengths=lengths, num_anchors=num_anchors, seed=seed)
    inputs = random_heads(batch)
    weights = torch.randn(inputs[0].shape, dtype=torch.float64)
    results = []
    for path in ("dense", "split"):
        out = attend_of(path, batch, window)(*inputs, window is not None)
        results.append((out, *torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)))
    for dense, split in zip(*results, strict=True):
        assert (dense is None or not dense.any()) if split is None else torch.allclose(dense, split, atol=1e-11)


@pytest.mark.parametrize("config", [make_config(), make_sliding_config()], ids=["full", "sliding"])
def test_split_equals_dense_through_the_whole_model_and_into_every_weight(config):
    model, batch = make_drafter(config), make_batch(config, lengths=(20, 13), padding=2)
    weights = torch.randn(*batch.blocks.ids_AS.shape, 16, dtype=torch.float64)
    results = {}
    for path in ("dense", "split"):
        states = batch.context.hidden_states_TKH.clone().requires_grad_()
        hidden = model(with_states(batch.context, states), batch.blocks, batch.embedding_VH, path)
        results[path] = [hidden, *torch.autograd.grad((hidden * weights).sum(), [states, *model.parameters()])]
    for dense, split in zip(results["dense"], results["split"], strict=True):
        assert torch.allclose(dense, split, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [17, 127, 129, 1000])
def test_any_length_works(length):
    """TN-10: nothing need be divisible by the block size or by 128."""
    config = make_config()
    model, batch = make_drafter(config), make_batch(config, lengths=(length,), num_anchors=9)
    with torch.no_grad():
        dense = model(batch.context, batch.blocks, batch.embedding_VH, "dense")
        split = model(batch.context, batch.blocks, batch.embedding_VH, "split")
    assert torch.allclose(dense, split, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [make_config(), make_sliding_config()], ids=["full", "sliding"])
def test_flex_equals_dense_on_cuda_in_outputs_and_gradients(config):
    model = make_drafter(config, dtype=torch.float32).cuda()
    for seed, lengths in enumerate([(200, 90), (33,), (150, 20, 7)]):
        batch = make_batch(config, lengths=lengths, num_anchors=40, seed=seed, dtype=torch.float32)
        context, blocks, embedding = batch.context.to("cuda"), batch.blocks.to("cuda"), batch.embedding_VH.cuda()
        results = []
        for path in ("dense", "flex"):
            hidden = model(context, blocks, embedding, path)
            results.append([hidden, *torch.autograd.grad(hidden.square().sum(), list(model.parameters()))])
        for dense, flex in zip(*results, strict=True):
            assert float((dense - flex).norm() / dense.norm()) < 1e-3
