"""Choose tokens so that an answer does not depend on the batch it is made in: each has random numbers of its own.

In shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from dflash_tools.config import SamplingSection
from dflash_tools.generate.seeds import uniform_numbers


def choose_tokens(logits_BV: Tensor, uniform_B: Tensor, sampling: SamplingSection) -> Tensor:
    """Choose one token per row: the likeliest, or by temperature, then top_k, then top_p.

    Args:
        logits_BV: Logits.
        uniform_B: A number in [0, 1) per row; the token is the one at this place of the cumulated probabilities,
            likeliest first.
        sampling: How to choose.

    Returns:
        Token ids. Shape: (B,).
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    count = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
    top_BK, ids_BK = torch.topk(logits_BV.float() / sampling.temperature, count, dim=-1)
    probs_BK = torch.softmax(top_BK.double(), dim=-1)
    before_BK = probs_BK.cumsum(dim=-1) - probs_BK
    # A token is kept if the likelier ones do not reach top_p by themselves; the likeliest always is.
    probs_BK = torch.where(before_BK < sampling.top_p, probs_BK, 0.0)
    reached_BK = probs_BK.cumsum(dim=-1)
    wanted_B1 = uniform_B[:, None].to(reached_BK) * reached_BK[:, -1:]
    places_B1 = (reached_BK <= wanted_B1).sum(dim=-1, keepdim=True).clamp_max(count - 1)
    return ids_BK.gather(1, places_B1)[:, 0]


class Chooser(LogitsProcessor):
    """Leaves transformers' own decoding loop one token to choose from.

    Args:
        sampling: How to choose.
        seeds: Of each row's answer.
        max_new_tokens: Longest answer.
        device: Where the logits are.
    """

    def __init__(
        self, sampling: SamplingSection, seeds: Sequence[int], max_new_tokens: int, device: torch.device
    ) -> None:
        self._sampling = sampling
        numbers = np.stack([uniform_numbers(seed, max_new_tokens) for seed in seeds])
        self._uniform_BT = torch.from_numpy(numbers).to(device)
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Args: ids so far, and logits of the next token, (B, V). Returns: the same with all but one at -inf."""
        chosen_B = choose_tokens(scores, self._uniform_BT[:, self._step], self._sampling)
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen_B[:, None], 0.0)
