"""The loop on a real small model: SmolLM2-135M from its package, with a drafter of random weights."""

import pytest
from tiny_models import SMOLLM2

from dflash_tools.config import TargetSection
from dflash_tools.data import load_tokenizer
from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode
from dflash_tools.evaluate.prompts import builtin_prompts
from dflash_tools.target.load import load_target


def decode_plain(target, prompt, options):
    return decode(target, [prompt], options)[0]


def decode_speculative(pair, prompt, options, **kwargs):
    return decode(pair.target, [prompt], options, pair, **kwargs)[0]


@pytest.mark.slow
def test_a_random_drafter_reproduces_the_greedy_text_of_smollm2_in_float32(make_drafter):
    target = load_target(TargetSection(**SMOLLM2, dtype="float32", device="cpu"))
    drafter = make_drafter(
        hidden_size=576,
        vocab_size=target.identity.vocab_size,
        target_layer_ids=(1, 8, 14, 20, 27),
        num_target_layers=30,
        block_size=8,
        initializer_range=0.02,
    )
    pair, tokenizer = Pair.of(target, drafter), load_tokenizer(**SMOLLM2)
    options = DecodeOptions(
        max_new_tokens=10, num_draft_tokens=7, temperature=0.0, stop_token_ids=frozenset({2}), seed=0
    )
    for prompt in builtin_prompts(tokenizer, {})[0:16:8]:
        fast = decode_speculative(pair, prompt.token_ids, options)
        assert fast.token_ids == decode_plain(target, prompt.token_ids, options).token_ids
