from dataclasses import replace

import pytest
import torch

from dflash_tools.config import TargetSection
from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode_plain, decode_speculative
from dflash_tools.evaluate.session import TargetSession
from dflash_tools.target.load import load_target

OPTIONS = DecodeOptions(max_new_tokens=40, num_draft_tokens=5, temperature=0.0, stop_token_ids=frozenset(), seed=0)
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def pair(target, make_drafter):
    return Pair.of(target, make_drafter())


def reference_greedy(target, prompt, num_tokens):
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def test_plain_decoding_is_the_targets_own_greedy_text(target):
    assert decode_plain(target, PROMPT, OPTIONS).token_ids == reference_greedy(target, PROMPT, 40)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_a_random_drafter_reproduces_the_targets_greedy_text(target, pair, num_draft_tokens):
    answer = decode_speculative(pair, PROMPT, replace(OPTIONS, num_draft_tokens=num_draft_tokens))
    assert answer.token_ids == reference_greedy(target, PROMPT, 40)
    assert sum(cycle.num_tokens for cycle in answer.cycles) >= 39
    assert all(cycle.num_tokens == cycle.num_accepted + 1 <= num_draft_tokens + 1 for cycle in answer.cycles)


class Oracle:
    """A drafter that knows the answer, up to a number of tokens per block."""

    def __init__(self, config, answer, prompt_length, good):
        self.config, self.answer, self.prompt_length, self.good = config, answer, prompt_length, good
        self.context = 0

    def append_context(self, cache, states, positions):
        assert positions.tolist() == list(range(self.context, self.context + states.shape[1]))
        self.context += states.shape[1]
        cache.keys[:] = [torch.empty(1, self.context)]

    def draft(self, cache, ids, start, embedding):
        self.start = start
        assert ids[0, 0] == self.answer[start - self.prompt_length]
        return torch.zeros(1, ids.shape[1], embedding.shape[1])


class OracleHead:
    def __init__(self, drafter, vocab_size):
        self.drafter, self.vocab_size = drafter, vocab_size

    def logits(self, hidden):
        at = self.drafter.start - self.drafter.prompt_length + 1
        right = self.drafter.answer[at : at + len(hidden)] + [0] * len(hidden)
        drafted = [
            token if slot < self.drafter.good else (token + 1) % self.vocab_size
            for slot, token in enumerate(right[: len(hidden)])
        ]
        return torch.nn.functional.one_hot(torch.tensor(drafted), self.vocab_size).float()


@pytest.mark.parametrize("good", [0, 2, 5])
def test_the_number_accepted_is_the_number_that_was_right(target, pair, good):
    answer = reference_greedy(target, PROMPT, 60)
    oracle = Oracle(pair.drafter.config, answer, len(PROMPT), good)
    known = replace(pair, drafter=oracle, head=OracleHead(oracle, target.identity.vocab_size))
    decoded = decode_speculative(known, PROMPT, OPTIONS)
    assert decoded.token_ids == answer[:40]
    assert {cycle.num_accepted for cycle in decoded.cycles} == {good}
    assert len(decoded.cycles) == -(-39 // (good + 1))


def test_an_answer_ends_with_the_first_stop_token_and_counts_nothing_after_it(target, pair):
    answer = reference_greedy(target, PROMPT, 60)
    oracle = Oracle(pair.drafter.config, answer, len(PROMPT), 5)
    known = replace(pair, drafter=oracle, head=OracleHead(oracle, target.identity.vocab_size))
    stop = next(token for token in answer[2:] if token not in answer[:2])
    position = answer.index(stop)
    options = replace(OPTIONS, stop_token_ids=frozenset({stop}))
    decoded = decode_speculative(known, PROMPT, options)
    assert decoded.token_ids == answer[: position + 1]
    assert decoded.token_ids == decode_plain(target, PROMPT, options).token_ids
    assert 1 + sum(cycle.num_tokens for cycle in decoded.cycles) == position + 1


def test_the_gap_of_each_token_is_that_of_plain_decoding(target, pair):
    plain, fast = decode_plain(target, PROMPT, OPTIONS), decode_speculative(pair, PROMPT, OPTIONS)
    assert len(plain.gaps) == len(fast.gaps) == 40
    torch.testing.assert_close(torch.tensor(plain.gaps), torch.tensor(fast.gaps), rtol=1e-3, atol=1e-3)


def test_the_states_kept_are_those_of_one_forward_over_the_whole_text(target, pair):
    answer = decode_speculative(pair, PROMPT, OPTIONS, keep_states=True)
    states = torch.cat(answer.states)
    session = TargetSession(target, pair.drafter.config.target_layer_ids)
    whole = session.prefill([*PROMPT, *answer.token_ids])
    torch.testing.assert_close(states[:55], whole.states_TKH[:55], rtol=1e-3, atol=1e-4)


def test_sampling_with_a_seed_repeats_and_differs_from_greedy(target, pair):
    options = replace(OPTIONS, temperature=1.0)
    first, again = decode_speculative(pair, PROMPT, options), decode_speculative(pair, PROMPT, options)
    assert first.token_ids == again.token_ids
    assert first.token_ids != decode_plain(target, PROMPT, OPTIONS).token_ids


def test_bfloat16_runs_and_keeps_the_dtype(tiny_target_dir, make_drafter):
    target = load_target(TargetSection(model=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    pair = Pair.of(target, make_drafter())
    assert pair.drafter.fc.weight.dtype == torch.bfloat16
    assert len(decode_speculative(pair, PROMPT, OPTIONS).token_ids) == 40
