import pytest
import torch

from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode
from dflash_tools.evaluate.gap import GapCounts, accepted_at, accepted_on_walk, gap_steps
from dflash_tools.evaluate.prompts import Prompt


def decode_speculative(pair, prompt, options, **kwargs):
    return decode(pair.target, [prompt], options, pair, **kwargs)[0]


PROMPT = Prompt(name="p", kind="k", token_ids=tuple(range(20, 40)), continuation=tuple(range(60, 90)))
OPTIONS = DecodeOptions(max_new_tokens=40, num_draft_tokens=3, temperature=0.0, stop_token_ids=frozenset(), seed=0)


@pytest.fixture(scope="module")
def pair(target, make_drafter):
    return Pair.of(target, make_drafter(block_size=4))


def test_walking_the_targets_own_text_visits_the_anchors_of_decoding_and_accepts_the_same(pair):
    answer = decode_speculative(pair, PROMPT.token_ids, OPTIONS, keep_states=True)
    text = [*PROMPT.token_ids, *answer.token_ids]
    counts = accepted_on_walk(pair, torch.cat(answer.states), text, len(PROMPT.token_ids), 3)
    assert counts == [cycle.num_accepted for cycle in answer.cycles][: len(counts)]
    assert len(counts) >= len(answer.cycles) - 3
    at = accepted_at(pair, torch.cat(answer.states), text, [cycle.start for cycle in answer.cycles[:5]], 3)
    assert at == counts[:5]


def test_every_text_is_tried_and_missing_ones_are_none(pair):
    answer = decode_speculative(pair, PROMPT.token_ids, OPTIONS, keep_states=True)
    counts = GapCounts()
    counts.add(pair, PROMPT, answer, 3, seed=0)
    assert len(counts.uniform_on_data) == 27  # anchors whose whole block lies in the text
    assert counts.walk_on_data
    assert len(counts.uniform_on_own) == 32
    analysis = counts.analysis(1.5, 2.0)
    assert analysis["true"] == 1.5
    assert gap_steps(analysis)[0]["before"] == 2.0
    assert GapCounts().analysis(1.5, None)["uniform_anchors_on_data"] is None
    assert gap_steps(GapCounts().analysis(1.5, None)) == []
