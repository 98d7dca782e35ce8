"""SGD with momentum: torch's fused kernels, and its foreach kernels for shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from booster.errors import ConfigError

from .base import OptimizerBase, check_flags, check_learning_rate, check_non_negative
from .param_update import ParamUpdate


class FusedSGD(OptimizerBase):
    """SGD with momentum (Sutskever et al., ICML 2013), with the arithmetic of torch.optim.SGD.

    It runs torch's fused kernels, and the foreach kernels for shards. As in torch, and unlike in the paper, the
    velocity does not contain `lr`, and starts as the first gradient, which is not dampened. `wd_after_momentum` is
    apex's: the weights decay by `lr * weight_decay`, decoupled from the momentum.

    Bytes per element: 4 with momentum. Updates are elementwise, so shards need no communication.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening of the gradient in the velocity.
        weight_decay: Weight decay (L2 term in the gradient unless `wd_after_momentum`).
        nesterov: If True, Nesterov momentum; requires momentum and no dampening.
        wd_after_momentum: If True, decoupled weight decay.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "wd_after_momentum": wd_after_momentum,
            },
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_learning_rate(group)
        for name in ("momentum", "dampening", "weight_decay"):
            check_non_negative(group, name)
        check_flags(group, "nesterov", "wd_after_momentum")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ConfigError(
                f"nesterov=True needs momentum and no dampening, got momentum={group['momentum']!r} and"
                f" dampening={group['dampening']!r}: give momentum=0.9 or similar, and dampening=0"
            )

    def _update(self, steps: list[ParamUpdate]) -> None:
        for group in self.param_groups:
            group_updates = [step for step in steps if step.group is group]
            # In one kernel call either all parameters have a velocity, or none has.
            has_velocity = [step.state.get("momentum_buffer") is not None for step in group_updates]
            for is_first in (True, False):
                chosen = [
                    step for step, has_one in zip(group_updates, has_velocity, strict=True) if has_one is not is_first
                ]
                if chosen:
                    self._update_together(chosen, group, is_first=is_first)

    def _update_together(self, steps: Sequence[ParamUpdate], group: Mapping[str, Any], *, is_first: bool) -> None:
        weights, lr = [step.weights for step in steps], float(group["lr"])
        is_decoupled = group["wd_after_momentum"]
        if is_decoupled and group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        has_momentum = bool(group["momentum"])
        velocities: list[Tensor | None] = [
            self._state_tensor(step, "momentum_buffer") if has_momentum and not is_first else None for step in steps
        ]
        kernels = set(_get_fused_kernels_supported_devices())
        # The fused kernel rounds a tensor's last few elements differently. Results must not depend on how parameters
        # are sharded, so shards use the foreach kernels.
        is_fused = all(step.shard is None and step.weights.device.type in kernels for step in steps)
        sgd(
            weights,
            [step.gradient for step in steps],
            velocities,
            fused=is_fused,
            foreach=not is_fused,
            weight_decay=0.0 if is_decoupled else group["weight_decay"],
            momentum=group["momentum"],
            lr=lr,
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        for step, velocity in zip(steps, velocities, strict=True) if has_momentum else ():
            step.state["momentum_buffer"] = velocity
