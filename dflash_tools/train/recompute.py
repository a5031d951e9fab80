"""Activation checkpointing: memory for time."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from dflash_tools.drafter.model import DFlashDrafter


def recompute_layers(model: DFlashDrafter) -> None:
    """Let the backward pass compute each layer again from its input, so that nothing inside a layer is kept.

    Names of weights stay, and so do the numbers: the same operations run on the same values.
    """
    for layer in model.layers:
        # Nothing inside draws random numbers.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
