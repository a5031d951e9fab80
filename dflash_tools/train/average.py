"""An exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dflash_tools.train.optimizer import trainable_parameters


class AveragedWeights:
    """A second set of weights that follows the masters slowly; it is what is evaluated and exported."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start at the weights that the model has now."""
        self._masters = trainable_parameters(model)
        self._decay = decay
        self._averages = {name: parameter.detach().clone() for name, parameter in self._masters.items()}

    @torch.no_grad()
    def follow(self, num_updates: int) -> None:
        """Move towards the masters after an update.

        Early on the decay is (1 + n) / (10 + n), so that fresh weights, from which the first updates lead far away, are
        soon forgotten.

        Args:
            num_updates: Updates made so far, this one included: n.
        """
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_(list(self._averages.values()), list(self._masters.values()), 1.0 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Let the model compute with the average; afterwards it has its masters back, the very same tensors."""
        masters = {name: parameter.data for name, parameter in self._masters.items()}
        try:
            for name, parameter in self._masters.items():
                parameter.data = self._averages[name]
            yield
        finally:
            for name, parameter in self._masters.items():
                parameter.data = masters[name]

    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name; views, not copies."""
        return dict(self._averages)
