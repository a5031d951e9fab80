import json

import pytest
import torch
from safetensors.torch import save_file

from dflash_tools.drafter.frozen import FrozenTarget, Head
from dflash_tools.errors import StoreError


def write_target(folder, tensors, **config):
    save_file(tensors, folder / "frozen.safetensors")
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5} | config))


def tensors(**more):
    return {"embed_tokens.weight": torch.randn(6, 4), "norm.weight": torch.ones(4)} | more


def test_a_tied_head_is_the_embedding_itself_and_stays_so(tmp_path):
    write_target(tmp_path, tensors())
    frozen = FrozenTarget.load(tmp_path, dtype=torch.bfloat16)
    assert frozen.head.weight_VH is frozen.embedding_VH
    assert frozen.embedding_VH.dtype == torch.bfloat16
    assert frozen.norm_eps == 1e-5


def test_an_untied_head_its_bias_scale_and_cap_are_read(tmp_path):
    head, bias = torch.randn(6, 4), torch.randn(6)
    more = {"lm_head.weight": head, "lm_head.bias": bias}
    write_target(tmp_path, tensors(**more), final_logit_softcapping=5.0, logits_scaling=4.0)
    frozen = FrozenTarget.load(tmp_path)
    rows = torch.randn(3, 4)
    expected = 5 * torch.tanh((rows @ head.T + bias) / 4 / 5)
    assert torch.allclose(frozen.head.logits(rows), expected, atol=1e-6)


def test_the_gradient_of_the_head_is_that_of_autograd():
    head = Head(weight_VH=torch.randn(6, 4).double(), bias_V=torch.randn(6).double(), scale=0.5, softcap=2.0)
    rows = torch.randn(3, 4).double().requires_grad_()
    logits = head.logits(rows)
    slopes = torch.randn(3, 6).double()
    (expected,) = torch.autograd.grad(logits, rows, slopes)
    assert torch.allclose(head.backward(slopes, logits.detach()), expected)


def test_a_folder_without_the_frozen_parts_says_extract_again(tmp_path):
    with pytest.raises(StoreError, match=r"unreadable.*extract again"):
        FrozenTarget.load(tmp_path)
    write_target(tmp_path, {"embed_tokens.weight": torch.randn(6, 4)})
    with pytest.raises(StoreError, match=r"norm\.weight missing; extract again"):
        FrozenTarget.load(tmp_path)
