"""AdamW on float32 master weights, and its state as plain named tensors."""

import torch
from torch import Tensor, nn

from dflash_tools.config import OptimizerSection

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, settings: OptimizerSection) -> torch.optim.AdamW:
    """Make AdamW with its moments at zero; matrices are decayed, norm weights are not.

    The state exists from the start, so that a checkpoint looks the same before and after the first update.

    Raises:
        ValueError: If a parameter is not float32: bfloat16 masters lose small updates of norm weights near 1.
    """
    parameters = trainable_parameters(model)
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; master weights must be float32")
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training changes, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use this rate in the next update of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``<key>.<parameter name>``; views, not copies."""
    return {
        f"{key}.{name}": optimizer.state[parameter][key]
        for name, parameter in trainable_parameters(model).items()
        for key in STATE_KEYS
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put saved state back, bit for bit.

    Raises:
        ValueError: If names or shapes are not those of this model.
    """
    expected = optimizer_tensors(optimizer, model)
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())
        raise ValueError(f"optimizer state has other tensors than the model: {', '.join(odd[:3])} ...")
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name}: shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
        tensor.copy_(tensors[name])
