"""What all strategies over several ranks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from booster.comm import (
    check_same_across_ranks,
    group_rank,
    group_size,
    is_initialized,
    release_groups,
    release_unused_groups,
)
from booster.device import current_device
from booster.errors import ConfigError
from booster.interface import Plugin
from booster.validation import error_of

if TYPE_CHECKING:
    from booster.checkpoint_io import CheckpointIO

Arguments = TypeVar("Arguments")


def arguments_of(cls: type[Arguments], given: Mapping[str, Any]) -> Arguments:
    """Return an object of a dataclass whose fields are some of a constructor's arguments, under the same names."""
    return cls(**{field.name: given[field.name] for field in fields(cls)})  # type: ignore[arg-type]  # a dataclass


class DistributedPlugin(Plugin):
    """A strategy of ranks that know each other, each of which computes on a device of its own.

    A subclass is made in three steps: `super().__init__()`, its arguments, and `self._agree(...)`. Before that it makes
    no groups, as ranks that differ would wait for each other there in vain.

    Raises:
        ConfigError: Before `launch`.
    """

    def __init__(self) -> None:
        if not is_initialized():
            raise ConfigError(
                f"{type(self).__name__} was made before the processes know each other: call"
                " booster.launch_from_torch() and start the script with `booster run`"
            )
        release_unused_groups()  # of plugins that are gone
        self._device = current_device()

    def _agree(self, check: Callable[[], object]) -> None:
        """Return if a check of the arguments raises on no rank, and they are the same on all. Collective."""
        error = error_of(check)
        check_same_across_ranks(
            f"making a {type(self).__name__}", [] if error else self.config_fingerprint(), error=error
        )

    def supported_devices(self) -> list[str]:
        return ["cpu", self._device.type]

    def control_device(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_size(self) -> int:
        return group_size()

    @property
    def dp_rank(self) -> int:
        return group_rank()

    def close(self) -> None:
        release_groups(self._groups())

    def _groups(self) -> Iterable[dist.ProcessGroup | None]:
        """Return the groups that it has made, in the same order on all ranks; maybe others, and None."""
        return ()

    def control_checkpoint_io(self) -> bool:
        return False

    def get_checkpoint_io(self) -> CheckpointIO:
        from booster.checkpoint_io import GeneralCheckpointIO

        return GeneralCheckpointIO()
