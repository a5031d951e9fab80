import inspect

import pytest
import torch

from dflash_tools.config import TargetSection
from dflash_tools.target.capture import Capture, capture_states
from dflash_tools.target.load import load_target


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))


def ids(*shape, seed=0):
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))


def test_captured_layer_i_is_entry_i_plus_1_of_hidden_states(target):
    """EX-04, method test (a)."""
    ids_BT = ids(2, 9)
    states_BTKH = capture_states(target, ids_BT, (0, 1, 3))
    tuple_ = target.model(input_ids=ids_BT, output_hidden_states=True).hidden_states
    for k, layer in enumerate((0, 1, 3)):
        assert torch.equal(states_BTKH[:, :, k], tuple_[layer + 1])


def test_layers_come_in_the_order_asked_for_and_the_last_one_is_before_the_norm(target):
    ids_BT = ids(1, 6)
    states_BTKH = capture_states(target, ids_BT, (4, 2), last=True)
    forward = capture_states(target, ids_BT, (2, 4))
    assert torch.equal(states_BTKH[:, :, :2], forward[:, :, [1, 0]])
    hidden = target.model(input_ids=ids_BT, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(target.final_norm(states_BTKH[:, :, 2]), hidden)


def test_a_batch_of_any_size_gives_the_states_of_each_sample_alone(target):
    """EX-02: repeated calls and batch mates change nothing beyond rounding."""
    lengths = [5, 17, 9, 12, 3, 17, 8]
    samples = [ids(length, seed=length) for length in lengths]
    alone = [capture_states(target, sample[None], (1, 3))[0] for sample in samples]
    for batch_size in (4, 7, 4):
        for first in range(0, len(samples), batch_size):
            mates = samples[first : first + batch_size]
            padded = torch.nn.utils.rnn.pad_sequence(mates, batch_first=True)
            states_BTKH = capture_states(target, padded, (1, 3))
            for row, mate in enumerate(mates):
                torch.testing.assert_close(states_BTKH[row, : len(mate)], alone[first + row], rtol=1e-4, atol=1e-4)


def test_no_logits_are_made_and_layers_after_the_last_wanted_one_do_not_run(target):
    """EX-10: the head never runs."""
    ran = []
    handles = [target.head.register_forward_hook(lambda *_: ran.append("head"))]
    handles += [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(target.layers)]
    try:
        capture_states(target, ids(1, 4), (1, 2))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2]


def test_no_hook_stays_behind_even_after_an_error(target):
    before = [len(layer._forward_hooks) for layer in target.layers]
    with pytest.raises(ZeroDivisionError), Capture(target, (1,)):
        raise ZeroDivisionError
    capture_states(target, ids(1, 4), (1, 2))
    assert [len(layer._forward_hooks) for layer in target.layers] == before


def test_a_capture_follows_a_cached_decode(target):
    ids_BT = ids(1, 10)
    whole = capture_states(target, ids_BT, (1, 3))
    with torch.inference_mode(), Capture(target, (1, 3)) as capture:
        from transformers import DynamicCache

        cache = DynamicCache(config=target.model.config)
        name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"
        target.model(input_ids=ids_BT[:, :7], use_cache=True, **{name: cache})
        first = capture.states_BTKH
        target.model(input_ids=ids_BT[:, 7:], use_cache=True, **{name: cache})
        torch.testing.assert_close(torch.cat([first, capture.states_BTKH], dim=1), whole)


def test_states_can_be_asked_for_in_another_dtype(target):
    assert capture_states(target, ids(1, 4), (1,), dtype=torch.bfloat16).dtype == torch.bfloat16
