"""The learning rate as a pure function of the step."""

import math

from dflash_tools.config import OptimizerSection


def learning_rate_at(step: int, num_steps: int, settings: OptimizerSection) -> float:
    """Learning rate of one optimizer update.

    Rises linearly over the first ``warmup_ratio`` of the steps (the first update already has a rate above 0), then
    follows half a cosine or a line towards 0, which it would reach one step after the last, or stays.

    Args:
        step: Position in the plan, from 0. Skipped updates count, so that no state has to be kept.
        num_steps: Updates of the whole plan.
        settings: The peak rate, the warm-up share and the shape.

    Raises:
        ValueError: If the step lies outside the plan.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} lies outside a plan of {num_steps} steps")
    num_warmup_steps = math.ceil(settings.warmup_ratio * num_steps)
    if step < num_warmup_steps:
        return settings.learning_rate * (step + 1) / num_warmup_steps
    if settings.lr_scheduler_type == "constant":
        return settings.learning_rate
    progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    if settings.lr_scheduler_type == "linear":
        return settings.learning_rate * (1.0 - progress)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
