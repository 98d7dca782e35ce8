"""Strategy without a plugin: one process, one device, the same training loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .comm import group_size
from .data import shard_dataloader
from .device import current_device
from .errors import ConfigError
from .interface import Boosted, ModelWrapper, OptimizerWrapper, Plugin
from .lazy_init import move_to_device
from .mixed_precision import mixed_precision_names

if TYPE_CHECKING:
    from .checkpoint_io import CheckpointIO


class SingleDevicePlugin(Plugin):
    """Plugin for one device of one process.

    Args:
        device: Device, optional; defaults to the accelerator if there is one, else the CPU.

    Raises:
        ConfigError: Several processes were launched: each would train a separate model.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        # Processes that torch's launcher started, also before launch().
        variable = os.environ.get("WORLD_SIZE", "1")
        launched = int(variable) if "RANK" in os.environ and variable.isdigit() else 1
        processes = max(group_size(), launched)
        if processes > 1:
            raise ConfigError(
                f"Booster() without a plugin runs one process, but {processes} were launched: each would train a"
                " separate model. Choose a strategy, for example Booster(plugin='torch_ddp')"
            )
        self._device = current_device() if device is None else _parsed(device)

    def supported_devices(self) -> list[str]:
        return ["cpu", self._device.type]

    def supported_precisions(self) -> list[str]:
        return ["fp32", *mixed_precision_names()]

    def control_precision(self) -> bool:
        return False

    def control_device(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def dp_rank(self) -> int:
        return 0

    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: None = None) -> None:
        move_to_device(model, optimizer, self._device)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        placed: None = None,
    ) -> Boosted:
        boosted = ModelWrapper(model)
        boosted.model_parallel_size = max(1, group_size())  # ranks without a plugin get the same batches
        wrapped = None if optimizer is None else OptimizerWrapper(optimizer, boosted)
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=0, dp_size=1)  # the sample order of several ranks
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def leave_reduction(self, model: ModelWrapper, axis: str, handler: str) -> None:
        if axis != "dp":
            super().leave_reduction(model, axis, handler)

    def control_checkpoint_io(self) -> bool:
        return False

    def get_checkpoint_io(self) -> CheckpointIO:
        from .checkpoint_io import GeneralCheckpointIO

        return GeneralCheckpointIO()


def _parsed(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device!r} is not a torch device: write 'cpu', the name of an accelerator, or leave it out"
        ) from error
    if parsed.type == "meta":
        raise ConfigError(
            f"device={device!r} stores no values, and a model moved there loses its weights: write 'cpu', the name of"
            " an accelerator, or leave it out"
        )
    return parsed
