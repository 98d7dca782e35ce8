"""Arguments of a launch, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from booster.argument_checks import is_int
from booster.errors import ConfigError
from booster.random_state import check_seed
from booster.time_limits import Timeouts, check_seconds

__all__ = ["LaunchSettings", "available_backends", "check_backend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Arguments of `launch` that must match in a second launch; checked on construction."""

    rank: int
    world_size: int
    host: str
    port: int
    backend: str
    local_rank: int | None
    seed: int
    timeout_seconds: float
    setup_timeout_seconds: float
    checkpoint_timeout_seconds: float

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self._check_types()
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} with world_size={self.world_size} is outside of the world: "
                "ranks count from 0 to world_size - 1"
            )
        if self.local_rank is not None and not 0 <= self.local_rank < self.world_size:
            raise ConfigError(
                f"local_rank={self.local_rank} with world_size={self.world_size} is outside of the world: "
                "give the rank's index on its host, from 0"
            )
        for name in ("timeout_seconds", "setup_timeout_seconds", "checkpoint_timeout_seconds"):
            check_seconds(name, getattr(self, name))
        check_backend(self.backend)

    def _check_types(self) -> None:
        numbers: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        if is_int(self.world_size) and self.world_size > 1:
            numbers["port"] = self.port
        if self.local_rank is not None:
            numbers["local_rank"] = self.local_rank
        for name, value in numbers.items():
            if not is_int(value):
                raise ConfigError(
                    f"{name} must be an int, got {value!r} ({type(value).__name__}): write {name}=int(os.environ[...])"
                    " where it comes from the environment"
                )

    def timeouts(self) -> Timeouts:
        return Timeouts(
            training=self.timeout_seconds, setup=self.setup_timeout_seconds, checkpoint=self.checkpoint_timeout_seconds
        )

    def check_store_address(self) -> None:
        """Raise `ConfigError` unless host and port are a valid store address, if there are several ranks."""
        if self.world_size > 1 and not (self.host and 0 < self.port < 2**16):
            raise ConfigError(
                f"host={self.host!r}, port={self.port} is not a store address for {self.world_size} ranks: give the "
                "address of rank 0's host and a port in 1 .. 65535"
            )


def check_backend(backend: str) -> None:
    """Raise `ConfigError` unless this torch has the backend, or each of a list such as "cpu:gloo,cuda:nccl"."""
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed: install one from pytorch.org that has it")
    if not isinstance(backend, str):
        raise ConfigError(
            f"backend={backend!r} is a {type(backend).__name__}: give a name such as 'gloo' or 'nccl', or None for the"
            " default"
        )
    for part in backend.split(","):
        if part.split(":")[-1].lower() not in available_backends():
            raise ConfigError(
                f"backend={backend!r} is not in this torch: choose one of {', '.join(available_backends())}, "
                "or None for the default"
            )


def available_backends() -> list[str]:
    """Return the names of the backends that this torch can start."""
    names = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return [name for name in names if dist.is_backend_available(name)]
