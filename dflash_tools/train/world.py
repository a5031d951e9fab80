"""The processes of a run: who they are, and sums over all of them."""

import os
import re
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_tools.errors import ConfigError


class World(Protocol):
    """What training needs of its processes. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which process this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""

    def copy_from_first(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0."""

    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A world of one."""

    rank: int = 0
    size: int = 1

    def sum_in_place(self, tensor: Tensor) -> None:
        """Do nothing: the sum over one rank."""

    def copy_from_first(self, tensor: Tensor) -> None:
        """Do nothing: this is rank 0."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that torchrun started."""

    rank: int
    size: int

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def copy_from_first(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_world(device: torch.device) -> World:
    """Join the other processes of a run, if torchrun started several.

    Args:
        device: Where this rank computes; NCCL joins GPUs, gloo everything else.
    """
    if not started_by_torchrun():
        return OneProcess()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return ProcessGroup(rank=dist.get_rank(), size=dist.get_world_size())


def choose_device(setting: str) -> torch.device:
    """Turn the setting into a device; under torchrun each rank of a machine takes its own GPU.

    Raises:
        ConfigError: If the device is not there.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if setting not in {"auto", "cuda"} and not re.fullmatch(r"cuda:\d+", setting):
        raise ConfigError(f"hardware.device = {setting!r} is not a device; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"hardware.device = {setting!r}, but this machine has no CUDA device; use auto or cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if setting in {"auto", "cuda"} else torch.device(setting).index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"hardware.device = {setting!r} asks for CUDA device {index}, but there are {torch.cuda.device_count()}; "
            "start fewer processes or name another device"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_threads(setting: str | int) -> int:
    """CPU threads of this process: the setting, else all cores for one process and one under torchrun."""
    if isinstance(setting, int):
        return setting
    return 1 if started_by_torchrun() else len(os.sched_getaffinity(0))


class Threads:
    """Sets torch's CPU threads, part of what makes bits repeat, and puts the earlier number back."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._earlier = threads

    def __enter__(self) -> None:
        self._earlier = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._earlier)
