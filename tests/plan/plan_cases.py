"""Length distributions and settings that planner tests share."""

import numpy as np
from hypothesis import strategies as st

from dflash_tools.plan.buckets import FOUNDING_EDGES, assign_buckets, choose_edges

EDGES = np.array(FOUNDING_EDGES)


def lognormal_lengths(count=5000, seed=0):
    draws = np.random.default_rng(seed).normal(np.log(800), 1.0, count)
    return np.clip(np.exp(draws), 16, 8192).astype(np.int64)


def lognormal_mix(count=5000, seed=0):
    """The mix that the figures are stated on: lengths and ids of six buckets of equal token mass."""
    lengths = lognormal_lengths(count, seed)
    return lengths, assign_buckets(lengths, choose_edges(lengths, 6))


def _inside(bucket_id, count, generator):
    lowest = EDGES[bucket_id - 1] + 1 if bucket_id else 1
    return generator.integers(lowest, EDGES[bucket_id] + 1, count)


def ready_made_lengths():
    """The ready-made distributions, by name: edges are FOUNDING_EDGES, budget 8192."""
    generator = np.random.default_rng(0)
    rest = [_inside(b, 4, generator) for b in (0, 1, 3, 4, 5)]
    return {
        "dominant": np.concatenate([_inside(2, 980, generator), *rest]),
        "single": _inside(4, 200, generator),
        "two": np.concatenate([_inside(0, 300, generator), _inside(5, 300, generator)]),
        "edges": np.concatenate([[1], EDGES - 1, EDGES, (EDGES + 1)[:-1]]),
        "spread": np.tile([EDGES[4] + 1, EDGES[5]], 50),
        "tiny": np.array([700]),
        "three": np.array([700, 900, 900]),
        "lognormal": lognormal_lengths(),
        "prime": np.full(47, 8192),
    }


@st.composite
def length_lists(draw, max_size=120):
    """Lengths of one of several shapes, and edges around them."""
    shape = draw(st.sampled_from(["any", "few values", "skewed"]))
    if shape == "any":
        lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=max_size))
    elif shape == "few values":
        values = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
        lengths = draw(st.lists(st.sampled_from(values), min_size=1, max_size=max_size))
    else:
        lengths = [1 + value**2 // 400 for value in draw(st.lists(st.integers(1, 399), min_size=1, max_size=max_size))]
    inner = draw(st.sets(st.integers(1, 399), max_size=8))
    return np.array(lengths), np.array(sorted({*inner, 400}))
