"""Batches, halving and padding, without a model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.errors import StoreError
from dflash_tools.extract import forward as module
from dflash_tools.extract.forward import Forward, padded_tokens, read_safe_tokens, write_safe_tokens


class NoModel:
    """Stands for a target on the CPU."""

    device = torch.device("cpu")


def echo(limit):
    """Give each token's id as its state; memory runs out beyond ``limit`` padded tokens."""

    def capture(target, ids_BT, layer_ids, *, dtype, last):
        if ids_BT.numel() > limit:
            raise torch.OutOfMemoryError
        return ids_BT[:, :, None, None].to(torch.bfloat16).expand(-1, -1, len(layer_ids), 2).contiguous()

    return capture


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(30, 400))
def test_every_sample_comes_back_once_and_in_order_whatever_the_memory(lengths, limit):
    ids = [np.full(length, number + 1, dtype=np.int32) for number, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "capture_states", echo(limit))
        forward = Forward(target=NoModel(), layer_ids=(0, 1))
        for _ in range(2):
            states, was_cut = forward.run(ids, [str(number) for number in range(len(ids))])
            samples = [bits for batch in states for bits in batch.samples()]
            assert [len(bits) for bits in samples] == lengths
            for number, bits in enumerate(samples):
                values = torch.from_numpy(np.array(bits)).view(torch.bfloat16).float()
                assert (values == number + 1).all()
            assert was_cut == (padded_tokens(ids) > limit)
    assert (forward.safe_tokens is None) == (padded_tokens(ids) <= limit)
    if forward.safe_tokens is not None:
        assert forward.safe_tokens <= limit or forward.safe_tokens < padded_tokens(ids)


def test_the_safe_size_never_rises_again():
    ids = [np.ones(length, dtype=np.int32) for length in (2, 2, 2, 2, 9, 9, 9, 9)]
    tried = []

    def capture(target, ids_BT, layer_ids, *, dtype, last):
        tried.append(ids_BT.numel())
        return echo(10)(target, ids_BT, layer_ids, dtype=dtype, last=last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "capture_states", capture)
        Forward(target=NoModel(), layer_ids=(0,)).run(ids, [str(number) for number in range(8)])
    assert sum(size > 10 for size in tried) <= 4, tried


def test_other_runtime_errors_are_not_taken_for_missing_memory(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(module, "capture_states", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Forward(target=NoModel(), layer_ids=(0,)).run([np.ones(3, dtype=np.int32)], ["a"])


def test_memory_of_the_host_that_runs_out_counts_as_missing_memory(monkeypatch):
    monkeypatch.setattr(module, "capture_states", lambda *args, **kwargs: torch.empty(10**15))
    with pytest.raises(StoreError, match="sample a: 3 tokens do not fit"):
        Forward(target=NoModel(), layer_ids=(0,)).run([np.ones(3, dtype=np.int32)], ["sample a"])


def test_the_safe_size_is_read_back_and_a_torn_hint_is_no_hint(tmp_path):
    assert read_safe_tokens(tmp_path) is None
    write_safe_tokens(tmp_path, 512)
    assert read_safe_tokens(tmp_path) == 512
    (tmp_path / "memory.json").write_text("{")
    assert read_safe_tokens(tmp_path) is None
