from dataclasses import replace

import pytest
import torch

from dflash_tools.config import TargetSection
from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode
from dflash_tools.evaluate.session import TargetSession
from dflash_tools.target.load import load_target


def decode_plain(target, prompt, options):
    return decode(target, [prompt], options)[0]


def decode_speculative(pair, prompt, options, **kwargs):
    return decode(pair.target, [prompt], options, pair, **kwargs)[0]


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
    """Knows the answers of several prompts; recognises a row by its cache."""

    def __init__(self, config, answers, good):
        self.config, self.answers, self.good = config, answers, good
        self.seen = {}

    def append_context(self, cache, states, positions):
        if id(cache) not in self.seen:
            length = states.shape[1]
            self.seen[id(cache)] = next(prompt for prompt in self.answers if len(prompt) == length)
        cache.keys[:] = [torch.empty(1, int(positions[-1]) + 1)]

    def draft(self, cache, ids, start, embedding):
        prompt = self.seen[id(cache)]
        at = start - len(prompt)
        assert ids[0, 0] == self.answers[prompt][at]
        self.right, self.num_good = self.answers[prompt][at + 1 :], self.good[prompt]
        return torch.zeros(1, ids.shape[1], embedding.shape[1])


class OracleHead:
    weight_VH = torch.empty(0)

    def __init__(self, drafter, vocab_size):
        self.drafter, self.vocab_size = drafter, vocab_size

    def logits(self, hidden):
        right = (self.drafter.right + [0] * len(hidden))[: len(hidden)]
        good = self.drafter.num_good
        drafted = [token if slot < good else (token + 1) % self.vocab_size for slot, token in enumerate(right)]
        return torch.nn.functional.one_hot(torch.tensor(drafted), self.vocab_size).float()


def oracle_pair(pair, answers, good):
    """A pair whose drafts are right up to ``good[prompt]`` tokens."""
    oracle = Oracle(pair.drafter.config, answers, good)
    return replace(pair, drafter=oracle, head=OracleHead(oracle, pair.target.identity.vocab_size))


@pytest.mark.parametrize("good", [0, 2, 5])
def test_the_number_accepted_is_the_number_that_was_right(target, pair, good):
    answer = reference_greedy(target, PROMPT, 60)
    known = oracle_pair(pair, {tuple(PROMPT): answer}, {tuple(PROMPT): good})
    decoded = decode_speculative(known, PROMPT, OPTIONS)
    assert decoded.token_ids == answer[:40]
    assert {cycle.num_accepted for cycle in decoded.cycles} == {good}
    assert len(decoded.cycles) == -(-39 // (good + 1))


def test_an_answer_ends_with_the_first_stop_token_and_counts_nothing_after_it(target, pair):
    answer = reference_greedy(target, PROMPT, 60)
    known = oracle_pair(pair, {tuple(PROMPT): answer}, {tuple(PROMPT): 5})
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
    whole = session.prefill([[*PROMPT, *answer.token_ids]])
    torch.testing.assert_close(states[:55], whole.states[0][:55], rtol=1e-3, atol=1e-4)


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


PROMPTS = [PROMPT, PROMPT[:7], [*PROMPT, *range(60, 90)], PROMPT[5:12], PROMPT[::-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_of_unequal_prompts_gives_each_the_answer_it_gets_alone(target, pair, temperature):
    alone = [decode_speculative(pair, prompt, OPTIONS) for prompt in PROMPTS]
    stops = frozenset({alone[1].token_ids[6], alone[2].token_ids[17]})  # rows end at different times
    options = replace(OPTIONS, temperature=temperature, stop_token_ids=stops, max_new_tokens=24)
    together = decode(target, PROMPTS, options, pair, keep_states=True)
    without = decode(target, PROMPTS, options)
    for number, prompt in enumerate(PROMPTS):
        single = decode_speculative(pair, prompt, options, keep_states=True)
        assert together[number].token_ids == single.token_ids
        assert without[number].token_ids == decode_plain(target, prompt, options).token_ids
        counts = [cycle.num_accepted for cycle in single.cycles]
        assert [cycle.num_accepted for cycle in together[number].cycles] == counts
        states = torch.cat(together[number].states)
        torch.testing.assert_close(states, torch.cat(single.states), rtol=1e-3, atol=1e-3)


def test_rows_that_accept_unequally_keep_their_own_tokens(target, pair):
    """An oracle that is right in one row and wrong in the other leaves gaps in the second row's cache."""
    answers = {tuple(prompt): reference_greedy(target, prompt, 60) for prompt in PROMPTS[:2]}
    known = oracle_pair(pair, answers, {tuple(PROMPTS[0]): 5, tuple(PROMPTS[1]): 0})
    decoded = decode(target, PROMPTS[:2], OPTIONS, known)
    for prompt, answer in zip(PROMPTS[:2], decoded, strict=True):
        assert answer.token_ids == answers[tuple(prompt)][:40]
    assert [len(answer.cycles) for answer in decoded] == [7, 39]


@pytest.mark.slow
def test_the_sampling_loop_keeps_the_targets_distribution(tmp_path, make_drafter):
    """Chi-square over the third token of 3,000 answers, against all ways to reach it under the target alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=5, num_hidden_layers=5, initializer_range=0.6, **sizes)).save_pretrained(
        tmp_path
    )
    target = load_target(TargetSection(model=str(tmp_path), dtype="float32", device="cpu"))
    pair = Pair.of(target, make_drafter(hidden_size=16, vocab_size=5, mask_token_id=4, initializer_range=0.6))
    prompt, temperature = [0, 1, 2, 3], 0.9
    with torch.inference_mode():
        texts = torch.tensor([[*prompt, first, second] for first in range(5) for second in range(5)])
        probs = (target.model(texts).logits / temperature).softmax(-1)
    number = torch.arange(25)
    reach = probs[number, 3, number // 5] * probs[number, 4, number % 5]
    expected = (reach[:, None] * probs[:, 5]).sum(0).double()
    options = replace(OPTIONS, max_new_tokens=3, num_draft_tokens=3, temperature=temperature)
    counts, cycles = torch.zeros(5, dtype=torch.double), 0
    for seed in range(3000):
        answer = decode_speculative(pair, prompt, replace(options, seed=seed))
        counts[answer.token_ids[2]] += 1
        cycles += len(answer.cycles)
    assert cycles < 6000  # drafts were accepted
    chi_square = float(((counts - 3000 * expected) ** 2 / (3000 * expected)).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: passed once in a thousand times
