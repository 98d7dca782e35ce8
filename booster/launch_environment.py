"""This process's place in the world, as a launcher wrote it into the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from booster.errors import ConfigError

__all__ = ["Place", "has_torch_variables", "read_openmpi", "read_slurm", "read_torch"]

_TORCH_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
_TORCH = (*_TORCH_NUMBERS, "MASTER_ADDR")
_SLURM = ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
_OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands; `local_rank` None where nobody said, no host and port where none is needed."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str = ""
    port: int = 0


def has_torch_variables() -> bool:
    """Returns whether any of the variables is there that `booster run` and torchrun set."""
    return any(os.environ.get(name) for name in _TORCH)


def read_torch() -> Place:
    """Returns the place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: Some are missing or no numbers; as in the functions below.
    """
    texts = _read("booster run", _TORCH)
    rank, world_size, local_rank, port = _numbers("booster run", {name: texts[name] for name in _TORCH_NUMBERS})
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, host=texts["MASTER_ADDR"], port=port)


def read_slurm(host: str, port: int) -> Place:
    """Returns the place from SLURM_PROCID, SLURM_NPROCS and SLURM_LOCALID."""
    rank, world_size, local_rank = _numbers("srun", _read("srun", _SLURM))
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, host=host, port=port)


def read_openmpi(host: str, port: int) -> Place:
    """Returns the place from OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK."""
    rank, world_size, local_rank = _numbers("mpirun", _read("mpirun", _OPENMPI))
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, host=host, port=port)


def _read(launcher: str, names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment variables are missing: {', '.join(missing)}; so this process does not know its place in the "
            f"world: start it with `{launcher}`, which sets {', '.join(names)}"
        )
    return {name: os.environ[name] for name in names}


def _numbers(launcher: str, texts: dict[str, str]) -> list[int]:
    wrong = [f"{name}={text!r}" for name, text in texts.items() if not text.strip().isdecimal()]
    if wrong:
        raise ConfigError(
            f"environment variables are no numbers: {', '.join(wrong)}; so this process does not know its place in "
            f"the world: start it with `{launcher}`, or correct them"
        )
    return [int(text) for text in texts.values()]
