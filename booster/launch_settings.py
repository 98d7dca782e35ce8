"""What a launch is asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from booster.errors import ConfigError
from booster.random_state import check_seed

__all__ = ["LaunchSettings", "available_backends", "check_backend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What makes two launches the same; checked when it is made. The fields are the arguments of `launch`."""

    rank: int
    world_size: int
    host: str
    port: int
    backend: str
    local_rank: int | None
    seed: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} with world_size={self.world_size} is outside of the world: "
                "ranks count from 0 to world_size - 1"
            )
        if self.local_rank is not None and not 0 <= self.local_rank < self.world_size:
            raise ConfigError(
                f"local_rank={self.local_rank} with world_size={self.world_size} is outside of the world: "
                "give the number of the rank on its own machine, counted from 0"
            )
        if not self.timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds={self.timeout_seconds!r} leaves no time to wait for others: give a number above 0"
            )
        check_backend(self.backend)

    def check_meeting_place(self) -> None:
        """Raises `ConfigError` unless host and port can be a place where the ranks meet, if there are several."""
        if self.world_size > 1 and not (self.host and 0 < self.port < 2**16):
            raise ConfigError(
                f"host={self.host!r}, port={self.port} is no place where {self.world_size} ranks can meet: "
                "give the address of rank 0's machine and a port in 1 .. 65535"
            )


def check_backend(backend: str) -> None:
    """Raises `ConfigError` unless this torch has the backend, or each of a list like "cpu:gloo,cuda:nccl"."""
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed: install one from pytorch.org that has it")
    for part in backend.split(","):
        if part.split(":")[-1].lower() not in available_backends():
            raise ConfigError(
                f"backend={backend!r} is not in this torch: choose one of {', '.join(available_backends())}, "
                "or None for the default"
            )


def available_backends() -> list[str]:
    """Returns the names of the backends that this torch can start."""
    names = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return [name for name in names if dist.is_backend_available(name)]
