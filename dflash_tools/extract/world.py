"""Which of several extracting processes this one is, from torchrun's or SLURM's environment."""

import os
from dataclasses import dataclass
from typing import Literal

from dflash_tools.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """This process and how many there are."""

    rank: int
    world_size: int


def read_world() -> World:
    """Read RANK and WORLD_SIZE, else SLURM_PROCID and SLURM_NTASKS; alone if there are none.

    Raises:
        ConfigError: If they contradict each other.
    """
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
        if rank.isdigit() and size.isdigit():
            if int(rank) >= int(size):
                raise ConfigError(f"{rank_name} = {rank} but {size_name} = {size}; start with torchrun or srun")
            return World(int(rank), int(size))
    return World(0, 1)


def choose_threads(setting: Literal["auto"] | int, world: World) -> int:
    """CPU threads of each process: as set; auto = all usable cores alone, 1 beside other processes."""
    if setting != "auto":
        return setting
    return len(os.sched_getaffinity(0)) if world.world_size == 1 else 1
