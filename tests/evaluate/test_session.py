"""Caches that slide, and states that cannot be cut back."""

import pytest
import torch
from tiny_models import make_tiny_tokenizer

from dflash_tools.config import TargetSection
from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode
from dflash_tools.evaluate.session import TargetSession, batches_are_exact
from dflash_tools.target.load import load_target


def decode_plain(target, prompt, options):
    return decode(target, [prompt], options)[0]


def decode_speculative(pair, prompt, options, **kwargs):
    return decode(pair.target, [prompt], options, pair, **kwargs)[0]


PROMPT = list(range(20, 44))
OPTIONS = DecodeOptions(max_new_tokens=30, num_draft_tokens=5, temperature=0.0, stop_token_ids=frozenset(), seed=0)


def save(folder, model):
    make_tiny_tokenizer(folder)
    model.float().save_pretrained(folder)
    return load_target(TargetSection(model=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=322,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    return save(tmp_path_factory.mktemp("sliding"), MistralForCausalLM(config))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=322,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
        layer_types=["linear_attention", "full_attention"] * 3,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    return save(tmp_path_factory.mktemp("recurrent"), Qwen3NextForCausalLM(config))


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_cutting_back_leaves_what_was_never_run(kind, request):
    target = request.getfixturevalue(kind)
    session, fresh = TargetSession(target, (1, 3)), TargetSession(target, (1, 3))
    session.prefill([PROMPT])
    session.forward([[50, 51, 52, 53]])
    session.keep([1], 4)
    session.forward([[60, 61]])
    session.keep([2], 2)  # nothing to forget
    after = session.forward([[70, 71]])
    fresh.prefill([[*PROMPT, 50, 60, 61]])
    expected = fresh.forward([[70, 71]])
    torch.testing.assert_close(after.logits_BTV, expected.logits_BTV, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after.states[0], expected.states[0], rtol=1e-3, atol=1e-4)
    assert not batches_are_exact(target)
    assert session.recomputes is (kind == "recurrent")


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_a_random_drafter_reproduces_their_greedy_text_beyond_the_window(kind, request, make_drafter):
    target = request.getfixturevalue(kind)
    pair = Pair.of(target, make_drafter(vocab_size=target.identity.vocab_size))
    fast, plain = decode_speculative(pair, PROMPT, OPTIONS), decode_plain(target, PROMPT, OPTIONS)
    assert fast.token_ids == plain.token_ids
    assert fast.recomputed is (kind == "recurrent")
