import numpy as np
import pytest
import torch
from drafter.random_batch import make_batch, make_config
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.drafter.blocks import build_blocks, build_context


def blocks_of(ids, mask, anchors, block_size=4, gamma=2.0):
    arrays = np.array(ids, np.int32), np.array(mask, np.uint8), np.array(anchors, np.int64)
    return build_blocks(*([a] for a in arrays), block_size=block_size, mask_token_id=99, gamma=gamma)


def test_slot_k_is_labelled_with_the_token_k_after_the_anchor():
    """TN-08: no shift, and slot 0 is unsupervised."""
    blocks = blocks_of([10, 11, 12, 13, 14, 15], [1] * 6, [1])
    assert blocks.ids_AS.tolist() == [[11, 99, 99, 99]]
    assert blocks.labels_AS.tolist() == [[-100, 12, 13, 14]]


def test_supervision_stops_at_the_first_unsupervised_slot():
    blocks = blocks_of([10, 11, 12, 13, 14, 15], [1, 1, 1, 0, 1, 1], [1])
    assert blocks.labels_AS.tolist() == [[-100, 12, -100, -100]]
    assert blocks.supervised_A.tolist() == [1]
    assert blocks.whole_A.tolist() == [False]


def test_supervision_stops_at_the_end_of_the_sample_and_never_enters_the_next_one():
    blocks = build_blocks(
        [np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)],
        [np.ones(3, np.uint8)] * 2,
        [np.array([1]), np.array([0])],
        block_size=4,
        mask_token_id=99,
        gamma=1.0,
    )
    assert blocks.labels_AS.tolist() == [[-100, 3, -100, -100], [-100, 5, 6, -100]]
    assert blocks.document_ids_A.tolist() == [0, 1]
    assert blocks.offsets == (0, 1, 2)


def test_weights_decay_from_one_at_the_first_drafted_slot():
    blocks = blocks_of([0, 1, 2, 3], [1] * 4, [0], gamma=2.0)
    assert blocks.weights_AS[0].numpy() == pytest.approx([0, 1, np.exp(-0.5), np.exp(-1)], abs=1e-7)
    assert blocks.label_weight == pytest.approx(1 + np.exp(-0.5) + np.exp(-1))


@given(st.integers(0, 10**6), st.floats(0.2, 1.0))
def test_weight_and_label_stand_exactly_at_the_supervised_slots(seed, share):
    batch = make_batch(make_config(), lengths=(17, 1, 9), seed=seed, supervised_share=share)
    blocks = batch.blocks
    supervised = blocks.labels_AS >= 0
    slots = torch.arange(blocks.block_size)
    assert torch.equal(supervised, (slots >= 1) & (slots <= blocks.supervised_A[:, None]))
    assert torch.equal(supervised, blocks.weights_AS > 0)
    assert blocks.num_slots == int(supervised.sum())
    assert torch.all(blocks.supervised_A >= 1)
    for i in range(len(blocks)):
        document, anchor = int(blocks.document_ids_A[i]), int(blocks.anchors_A[i])
        for slot in range(1, int(blocks.supervised_A[i]) + 1):
            assert int(blocks.labels_AS[i, slot]) == batch.input_ids[document][anchor + slot]
            assert batch.loss_masks[document][anchor + slot] == 1


def test_a_sample_without_anchors_gives_no_blocks_and_keeps_its_place():
    batch = make_batch(make_config(), lengths=(9, 1, 9), num_anchors=3)
    assert batch.blocks.offsets == (0, 3, 3, 6)
    assert batch.context.offsets == (0, 9, 10, 19)


def test_positions_restart_in_every_document_and_rows_past_the_documents_are_padding():
    context = build_context(torch.zeros(7, 2, 4), [3, 2])
    assert context.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert context.document_ids_T.tolist() == [0, 0, 0, 1, 1, -1, -1]


def test_fewer_rows_than_tokens_are_refused():
    with pytest.raises(ValueError, match="5 tokens, but there are only 4 rows"):
        build_context(torch.zeros(4, 2, 4), [3, 2])
