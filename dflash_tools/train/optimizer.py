"""The update of float32 master weights: AdamW, or Muon and AdamW, with all its state as plain named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dflash_tools.config import OptimizerSection
from dflash_tools.errors import ConfigError

_ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
_MUON_KEYS = ("momentum_buffer",)


class DrafterOptimizer:
    """AdamW; with ``optimizer.name = "muon"`` the matrices inside the layers are updated by Muon instead.

    The fusion ``fc`` reads the target's states, as an embedding reads tokens, and stays with AdamW, as do all norms.
    Matrices are decayed, norm weights are not. The state exists from the start, so that a checkpoint looks the same
    before and after the first update.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSection) -> None:
        """Start with all moments at zero.

        Raises:
            ConfigError: If this installation has no Muon.
            ValueError: If a parameter is not float32: bfloat16 masters lose small updates of norm weights near 1.
        """
        self._parameters = trainable_parameters(model)
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}; master weights must be float32")
        uses_muon = settings.name == "muon"
        self._by_muon = {n for n, p in self._parameters.items() if uses_muon and n.startswith("layers.") and p.ndim > 1}
        adamw = self._make_adamw(settings)
        # Optimizer and its peak learning rate.
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [(adamw, settings.learning_rate)]
        if self._by_muon:
            self._parts.append((self._make_muon(settings), settings.muon_learning_rate))

    @property
    def num_updates(self) -> int:
        """Updates made so far; skipped steps do not count."""
        adamw, _ = self._parts[0]
        return int(next(iter(adamw.state.values()))["step"])

    def step(self, factor: float) -> None:
        """Make one update from the gradients of the parameters.

        Args:
            factor: Share of the peak learning rates.
        """
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as tensors named ``<key>.<parameter name>``; views, not copies."""
        return {
            f"{key}.{name}": optimizer.state[parameter][key]
            for name, parameter in self._parameters.items()
            for optimizer, keys in [self._part_of(name)]
            for key in keys
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put saved state back, bit for bit.

        Raises:
            ValueError: If names or shapes are not those of this model.
        """
        copy_named(self.tensors(), tensors, "optimizer state")

    def _part_of(self, name: str) -> tuple[torch.optim.Optimizer, tuple[str, ...]]:
        return (self._parts[1][0], _MUON_KEYS) if name in self._by_muon else (self._parts[0][0], _ADAMW_KEYS)

    def _make_adamw(self, settings: OptimizerSection) -> torch.optim.Optimizer:
        parameters = [p for name, p in self._parameters.items() if name not in self._by_muon]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        return optimizer

    def _make_muon(self, settings: OptimizerSection) -> torch.optim.Optimizer:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f'optimizer.name = "muon" needs torch 2.9 or newer, here is {torch.__version__}; '
                "run: pip install 'torch>=2.9', or use adamw"
            )
        parameters = [self._parameters[name] for name in self._parameters if name in self._by_muon]
        optimizer = torch.optim.Muon(
            parameters,
            lr=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            # An update of the size that AdamW's has at the same rate, whatever the shape of the matrix.
            adjust_lr_fn="match_rms_adamw",
        )
        for parameter in parameters:
            optimizer.state[parameter] = {
                "momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)
            }
        return optimizer


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training changes, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def copy_named(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors over those of the same names.

    Raises:
        ValueError: If names or shapes differ.
    """
    if into.keys() != tensors.keys():
        odd = sorted(into.keys() ^ tensors.keys())
        raise ValueError(f"{what} has other tensors than the model: {', '.join(odd[:3])} ...")
    for name, tensor in into.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name}: shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
        tensor.copy_(tensors[name])
