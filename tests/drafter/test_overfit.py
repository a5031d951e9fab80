"""Method test (j): labels, positions, masks and the decode loop agree, or this cannot reach full blocks."""

import numpy as np
import torch
from drafter.random_batch import make_config

from dflash_tools.drafter.anchors import valid_anchors
from dflash_tools.drafter.blocks import build_blocks, build_context
from dflash_tools.drafter.frozen import Head
from dflash_tools.drafter.loss import block_loss
from dflash_tools.drafter.model import DFlashDrafter, DrafterCache


def test_one_sample_is_learned_to_accuracy_one_and_decoded_in_full_blocks():
    """TN-02, TN-08: bfloat16 arithmetic over float32 weights; every tensor moves."""
    config = make_config(hidden_size=32, intermediate_size=64)
    generator = torch.Generator().manual_seed(0)
    ids = np.random.default_rng(0).integers(0, config.mask_token_id, 24).astype(np.int32)
    mask = np.ones(24, np.uint8)
    embedding = torch.randn(config.vocab_size, 32, generator=generator).bfloat16()
    states = torch.randn(24, 2, 32, generator=generator).bfloat16()
    blocks = build_blocks(
        [ids], [mask], [valid_anchors(mask)], block_size=4, mask_token_id=config.mask_token_id, gamma=4.0
    )
    context, head = build_context(states, [24]), Head(weight_VH=embedding)
    model = DFlashDrafter(config)
    model.init_weights(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(120):
        optimizer.zero_grad()
        sums = block_loss(model(context, blocks, embedding, "split"), blocks, head)
        (sums.weighted_sum / sums.label_weight).backward()
        optimizer.step()
    with torch.no_grad():
        sums = block_loss(model(context, blocks, embedding, "split"), blocks, head)
    assert torch.equal(sums.correct_by_slot, sums.count_by_slot)
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert decode(model, ids, states, embedding, head) == ids.tolist()


def decode(model, ids, states, embedding, head):
    """Follow the decode loop with a target that repeats the sample; every block must be accepted whole."""
    text, cache = [int(ids[0]), int(ids[1])], DrafterCache()
    while len(text) < len(ids):
        start = len(text) - 1
        model.append_context(cache, states[None, len(cache) : start], torch.arange(len(cache), start))
        block = torch.full((1, 4), model.config.mask_token_id)
        block[0, 0] = text[-1]
        drafted = head.logits(model.draft(cache, block, start, embedding)[0, 1:]).argmax(-1).tolist()
        left = len(ids) - len(text)
        assert drafted[:left] == ids[len(text) : len(text) + 3].tolist()
        text += drafted[:left]
        text += [int(ids[len(text)])] if len(text) < len(ids) else []  # the bonus token
    return text
