"""The learning rate as a pure function of the step."""

import math

from dflash_tools.config import OptimizerSection


def schedule_factor(step: int, num_steps: int, settings: OptimizerSection) -> float:
    """Share of the peak learning rate in one optimizer update; the same for AdamW and Muon.

    Rises linearly over the first ``warmup_ratio`` of the steps (the first update already has a rate above 0). Then
    cosine and linear fall towards 0, which they would reach one step after the last; constant stays; wsd stays and
    falls along half a cosine over the last ``decay_ratio`` of the steps.

    Args:
        step: Position in the plan, from 0. Skipped updates count, so that no state has to be kept.
        num_steps: Updates of the whole plan.
        settings: The warm-up share and the shape.

    Returns:
        Above 0, at most 1.

    Raises:
        ValueError: If the step lies outside the plan.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} lies outside a plan of {num_steps} steps")
    num_warmup_steps = math.ceil(settings.warmup_ratio * num_steps)
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if settings.lr_scheduler_type == "constant":
        return 1.0
    first = num_warmup_steps
    if settings.lr_scheduler_type == "wsd":
        first = max(first, num_steps - math.ceil(settings.decay_ratio * num_steps))
        if step < first:
            return 1.0
    progress = (step - first) / (num_steps - first)
    if settings.lr_scheduler_type == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
