"""Choose tokens: greedily, or at random in a way that keeps the target's distribution.

In shapes: S drafted tokens of a block, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of a drafted block.

    Attributes:
        num_accepted: Drafted tokens that stand, from the first on.
        next_token: The target's own token after them (the bonus token).
    """

    num_accepted: int
    next_token: int


def verify_greedy(target_logits: Tensor, drafted: Tensor) -> Verdict:
    """Accept the longest prefix that the target would have chosen itself.

    Args:
        target_logits: Row i predicts drafted token i; the last row predicts the token after all of them.
            Shape: (S + 1, V).
        drafted: Drafted tokens, on the CPU. Shape: (S,).
    """
    chosen = target_logits.argmax(dim=-1).cpu()
    num_accepted = int((chosen[:-1] == drafted).cumprod(dim=0).sum())
    return Verdict(num_accepted, int(chosen[num_accepted]))


def verify_sampled(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """Accept each drafted token with probability min(1, p / q); replace the first rejected one from max(p - q, 0).

    The tokens that stand, with the replacement or the bonus token, are distributed as if the target alone had sampled
    them. Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", appendix A.1.

    Args:
        target_probs: p; row i is the distribution of drafted token i, the last row that after all. Shape: (S + 1, V).
        draft_probs: q, from which the drafted tokens were sampled. Shape: (S, V).
        drafted: Drafted tokens, on the CPU. Shape: (S,).
        generator: Where the random numbers come from; on the CPU.
    """
    p, q = target_probs.double().cpu(), draft_probs.double().cpu()
    num_drafted = len(drafted)
    slots = torch.arange(num_drafted)
    draws = torch.rand(num_drafted, generator=generator, dtype=torch.float64)
    # A strict comparison, so that p = 0 is never accepted.
    accepted = draws * q[slots, drafted] < p[slots, drafted]
    num_accepted = int(accepted.long().cumprod(dim=0).sum())
    rest = p[num_accepted]
    if num_accepted < num_drafted:
        rest = (rest - q[num_accepted]).clamp_min(0.0)
    return Verdict(num_accepted, int(torch.multinomial(rest, 1, generator=generator)))


def softmax_at(logits: Tensor, temperature: float) -> Tensor:
    """Turn logits into probabilities at a temperature above 0. Shape: (..., V), float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token per row. Shape: (S, V) to (S,), on the CPU."""
    return torch.multinomial(probs.double().cpu(), 1, generator=generator).squeeze(-1)
