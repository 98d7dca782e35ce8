"""LocalSGDPlugin: replicas that communicate every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from booster.comm import broadcast, group_size, new_groups, new_mesh, timeout_scope
from booster.errors import ConfigError
from booster.interface import ModelWrapper
from booster.lazy_init import check_materialized, move_to_device
from booster.plugins.base import DistributedPlugin, PluginConfig, WrappedPair, arguments_of
from booster.validation import check_flag, is_count, is_non_nan_number

from .optimizer import LocalModel, LocalOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGDConfig(PluginConfig):
    """Options of `LocalSGDPlugin`, which documents them."""

    period: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether the averages are more than the mean of the weights."""
        return self.outer_lr != 1 or self.outer_momentum > 0

    def check(self, world_size: int) -> None:
        if not is_count(self.period):
            raise ConfigError(
                f"period={self.period!r} is not a number of steps: weights are averaged every `period` steps, give an"
                " int of 1 or more, such as 8"
            )
        if not is_non_nan_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ConfigError(
                f"outer_lr={self.outer_lr!r} is not a learning rate: give a number above 0, such as 0.7, or 1 for the"
                " mean of the weights"
            )
        if not is_non_nan_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_momentum={self.outer_momentum!r} is not a momentum: give a number from 0 to below 1, such as"
                " 0.9"
            )
        check_flag("nesterov", self.nesterov)
        if self.nesterov and self.outer_momentum == 0:
            raise ConfigError(
                "nesterov=True has no effect with outer_momentum=0: give an outer_momentum, such as 0.9, or leave"
                " nesterov out"
            )


class LocalSGDPlugin(DistributedPlugin):
    """Local SGD and DiLoCo: every rank trains its own replica, and all average their weights every `period` steps.

    Memory per rank: that of one process; with an outer optimizer 4 bytes per parameter more for the weights of the last
    average, and 4 for its momentum. Bytes sent per rank and step: 2(P-1)/P of the weights, divided by `period`. Local
    SGD: Stich, ICLR 2019. DiLoCo: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023, with outer_lr=0.7, outer_momentum=0.9, nesterov=True and a period of 500 steps of AdamW.

    Between two averages the ranks' weights differ, and nothing is communicated: gradients, their norm and clipping are
    each rank's own, and so are the optimizer's states, always.

    Collective: every rank must create it, with equal arguments.

    Args:
        period: Number of optimizer steps between two averages: a *round*.
        outer_lr: Learning rate of the outer optimizer, SGD, whose gradient is the mean over ranks of the weights at the
            start of a round minus those at its end. With 1 and no momentum the result is the mean of the weights.
        outer_momentum: Momentum of the outer optimizer.
        nesterov: If True, it is Nesterov momentum.

    Raises:
        ConfigError: `launch` was not called, or an argument is invalid; raised on all ranks.
        DesyncError: The ranks' arguments differ.
    """

    @timeout_scope("setup")
    def __init__(
        self, period: int = 8, outer_lr: float = 1.0, outer_momentum: float = 0.0, *, nesterov: bool = False
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._config = arguments_of(LocalSGDConfig, given)
        self._verify_arguments(lambda: self._config.check(group_size()))
        self._mesh = new_mesh(self._device.type, (group_size(),), ("dp",))
        # Gradients are averaged over the microbatches and counted items of this rank alone.
        self._own_group = new_groups([[rank] for rank in range(group_size())]) if group_size() > 1 else None

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self._own_group]

    def config_fingerprint(self) -> list[str]:
        return self._config.fingerprint

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def supported_precisions(self) -> list[str]:
        return ["fp32", "bf16"]

    def control_precision(self) -> bool:
        return False

    def leave_reduction(self, model: ModelWrapper, axis: str, handler: str) -> None:
        if axis != "dp":  # gradients are each rank's own
            super().leave_reduction(model, axis, handler)

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        """Return no candidates: `booster estimate` compares plugins that compute the same update."""
        return []

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        check_materialized(model)

    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: None = None) -> None:
        move_to_device(model, optimizer, self._device)
        broadcast([*model.parameters(), *model.buffers()])

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: None) -> WrappedPair:
        boosted = LocalModel(model, is_primary=self.dp_rank == 0)
        if optimizer is None:
            return boosted, None
        config = self._config
        wrapped = LocalOptimizer(optimizer, boosted, period=config.period, own_group=self._own_group)
        if config.has_outer_optimizer:
            wrapped.set_outer_optimizer(config.outer_lr, config.outer_momentum, nesterov=config.nesterov)
        return boosted, wrapped
