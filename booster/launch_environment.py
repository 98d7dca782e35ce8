"""Rank environment: this process's rank, world size and store address from a launcher's environment variables."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from booster.errors import ConfigError

__all__ = [
    "RankEnvironment",
    "choose_host",
    "choose_port",
    "first_set",
    "has_torch_rank",
    "has_torch_variables",
    "read_numbers",
    "read_torch",
]

_TORCH_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_TORCH_NUMBERS = (*_TORCH_RANK, "MASTER_PORT")
_TORCH = (*_TORCH_NUMBERS, "MASTER_ADDR")

# Note [Store address]
# srun and mpirun set the rank of a process, but no store address. It is, in this order: the argument; MASTER_ADDR and
# MASTER_PORT, which job scripts often export; derived from the launcher's other variables. The address is that of rank
# 0's host; rank 0 raises at once if it is not. The port is derived from the job's name, so that all ranks compute the
# same one and two jobs on one host rarely share it.
_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below the ephemeral ports: 32768 and up on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Rank of this process and store address; `local_rank` is None if unknown, host and port may be empty."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str = ""
    port: int = 0


def has_torch_rank() -> bool:
    """Return whether any rank variable of `booster run` and torchrun is set."""
    return first_set(_TORCH_RANK) is not None


def has_torch_variables() -> bool:
    """Return whether any variable of `booster run` and torchrun is set; job scripts set some of them."""
    return first_set(_TORCH) is not None


def read_torch() -> RankEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: Variables are missing or not numbers.
    """
    _require("booster run", _TORCH)
    rank, world_size, local_rank, port = read_numbers("booster run", _TORCH_NUMBERS)
    host = os.environ["MASTER_ADDR"]
    return RankEnvironment(rank=rank, world_size=world_size, local_rank=local_rank, host=host, port=port)


def read_numbers(launcher: str, names: Sequence[str]) -> list[int]:
    """Return the values of numeric variables of a launcher.

    Raises:
        ConfigError: Variables are missing or not numbers.
    """
    _require(launcher, names)
    wrong = [f"{name}={os.environ[name]!r}" for name in names if not os.environ[name].strip().isdecimal()]
    if wrong:
        raise ConfigError(
            f"environment variables are not numbers: {', '.join(wrong)}; so the rank of this process is unknown: start "
            f"it with `{launcher}`, or correct them"
        )
    return [int(os.environ[name]) for name in names]


def first_set(names: Sequence[str]) -> str | None:
    """Return the first of these variables that is set and not empty, or None."""
    return next((name for name in names if os.environ.get(name)), None)


def choose_host(host: str | None, find: Callable[[], str]) -> str:
    """Return the host of the store: as given, else MASTER_ADDR, else `find()`; see Note [Store address]."""
    if host is not None:
        return host
    return os.environ.get("MASTER_ADDR") or find()


def choose_port(port: int | None, launcher: str, names: Sequence[str]) -> int:
    """Return the port of the store: as given, else MASTER_PORT, else derived from the job's name.

    Args:
        port: Port given by the user, or None.
        launcher: Program that sets the variables.
        names: Variables that together name the job, equal on all ranks.

    Raises:
        ConfigError: MASTER_PORT is not a number, or no variable names the job.
    """
    if port is not None:
        return port
    if os.environ.get("MASTER_PORT"):
        return read_numbers(launcher, ["MASTER_PORT"])[0]
    if first_set(names) is None:
        raise ConfigError(
            f"no port was given, and none can be derived from the job's name, as `{launcher}` sets none of "
            f"{', '.join(names)} here: give port=..., equal on all ranks"
        )
    name = ".".join(os.environ.get(name, "") for name in names)
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


def _require(launcher: str, names: Sequence[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment variables are missing: {', '.join(missing)}; so the rank of this process is unknown: start "
            f"it with `{launcher}`, which sets {', '.join(names)}"
        )
