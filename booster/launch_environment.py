"""This process's place in the world, as a launcher wrote it into the environment."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from booster.errors import ConfigError

__all__ = [
    "Place",
    "choose_host",
    "choose_port",
    "first_set",
    "has_torch_rank",
    "has_torch_variables",
    "read_numbers",
    "read_torch",
]

_TORCH_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_TORCH_NUMBERS = (*_TORCH_PLACE, "MASTER_PORT")
_TORCH = (*_TORCH_NUMBERS, "MASTER_ADDR")

# Note [Meeting place]
# srun and mpirun say which rank a process is, but not where the ranks can meet. It is, in this order: the argument;
# MASTER_ADDR and MASTER_PORT, which job scripts often export; what can be told from the launcher's other variables.
# The address is that of rank 0's machine, and where rank 0 finds that it is not, it says so at once. The port follows
# from what names the job, so that all ranks know it and two jobs on one machine rarely meet in it.
_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below those that systems hand out to clients: 32768 and up on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands; `local_rank` None where nobody said, no host and port where none is needed."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str = ""
    port: int = 0


def has_torch_rank() -> bool:
    """Returns whether any of the variables is there that tell a rank as `booster run` and torchrun do."""
    return first_set(_TORCH_PLACE) is not None


def has_torch_variables() -> bool:
    """Returns whether any of the variables is there that `booster run` and torchrun set, as job scripts do in part."""
    return first_set(_TORCH) is not None


def read_torch() -> Place:
    """Returns the place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: Some are missing or no numbers.
    """
    _require("booster run", _TORCH)
    rank, world_size, local_rank, port = read_numbers("booster run", _TORCH_NUMBERS)
    host = os.environ["MASTER_ADDR"]
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, host=host, port=port)


def read_numbers(launcher: str, names: Sequence[str]) -> list[int]:
    """Returns the values of variables that a launcher sets to numbers.

    Raises:
        ConfigError: Some are missing or no numbers.
    """
    _require(launcher, names)
    wrong = [f"{name}={os.environ[name]!r}" for name in names if not os.environ[name].strip().isdecimal()]
    if wrong:
        raise ConfigError(
            f"environment variables are no numbers: {', '.join(wrong)}; so this process does not know its place in "
            f"the world: start it with `{launcher}`, or correct them"
        )
    return [int(os.environ[name]) for name in names]


def first_set(names: Sequence[str]) -> str | None:
    """Returns the first of these variables' names that is set to something, None if none is."""
    return next((name for name in names if os.environ.get(name)), None)


def choose_host(host: str | None, find: Callable[[], str]) -> str:
    """Returns where the ranks meet: as given, else MASTER_ADDR, else what `find` finds; see Note [Meeting place]."""
    if host is not None:
        return host
    return os.environ.get("MASTER_ADDR") or find()


def choose_port(port: int | None, launcher: str, names: Sequence[str]) -> int:
    """Returns the port where the ranks meet: as given, else MASTER_PORT, else one made from what names the job.

    Args:
        port: The user's own choice, None for none.
        launcher: The program that sets the variables.
        names: Variables that together name the job, equal on all ranks.

    Raises:
        ConfigError: MASTER_PORT is no number, or no variable names the job.
    """
    if port is not None:
        return port
    if os.environ.get("MASTER_PORT"):
        return read_numbers(launcher, ["MASTER_PORT"])[0]
    if first_set(names) is None:
        raise ConfigError(
            f"no port was given, and none can be made from the job's name as `{launcher}` sets none of "
            f"{', '.join(names)} here: give port=..., the same on all ranks"
        )
    name = ".".join(os.environ.get(name, "") for name in names)
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


def _require(launcher: str, names: Sequence[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment variables are missing: {', '.join(missing)}; so this process does not know its place in the "
            f"world: start it with `{launcher}`, which sets {', '.join(names)}"
        )
