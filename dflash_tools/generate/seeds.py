"""Random numbers of each answer: by prompt and turn, never by batch or order."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def answer_seed(seed: int, prompt_id: str, turn: int) -> int:
    """Seed of one answer. Returns 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def uniform_numbers(seed: int, count: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each token of an answer. Shape: (count,)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)
