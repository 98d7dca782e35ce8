"""SGD with momentum in one pass over memory, or over lists of tensors at once where they are shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from booster.errors import ConfigError

from .base import OptimizerBase, require_amount, require_flag, require_learning_rate
from .param_update import ParameterStep


class FusedSGD(OptimizerBase):
    """SGD with momentum (Sutskever et al., ICML 2013) as torch.optim.SGD computes it, by torch's fused
    kernels, and on shards by its foreach kernels.

    As in torch, and unlike in the paper, the velocity does not contain `lr`, and begins as the first gradient, which is
    not dampened. `wd_after_momentum` is apex's: weights decay by `lr * weight_decay` apart from the momentum.

    Bytes per element: 4 with momentum. Every element is updated by itself, so shards need no communication.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        momentum: What remains of the velocity.
        dampening: What is left out of each gradient that the velocity takes up.
        weight_decay: Added to the gradient, times the weights.
        nesterov: Look ahead along the velocity; with momentum, without dampening.
        wd_after_momentum: Decay the weights, not the velocity.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
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
        require_learning_rate(group)
        for name in ("momentum", "dampening", "weight_decay"):
            require_amount(group, name)
        for name in ("nesterov", "wd_after_momentum"):
            require_flag(group, name)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ConfigError(
                f"nesterov=True looks ahead along a velocity that momentum={group['momentum']!r} and"
                f" dampening={group['dampening']!r} do not keep whole: give momentum=0.9 or so, and dampening=0"
            )

    def _update(self, steps: list[ParameterStep]) -> None:
        for group in self.param_groups:
            members = [step for step in steps if step.group is group]
            # The kernels take a velocity from all of the parameters that they update together, or from none.
            has_begun = [step.state.get("momentum_buffer") is not None for step in members]
            for is_first in (True, False):
                chosen = [step for step, begun in zip(members, has_begun, strict=True) if begun is not is_first]
                if chosen:
                    self._update_alike(chosen, group, is_first=is_first)

    def _update_alike(self, steps: Sequence[ParameterStep], group: Mapping[str, Any], *, is_first: bool) -> None:
        weights, lr = [step.weights for step in steps], float(group["lr"])
        is_apart = group["wd_after_momentum"]
        if is_apart and group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        keeps = bool(group["momentum"])
        velocities: list[Tensor | None] = [
            self._state_tensor(step, "momentum_buffer") if keeps and not is_first else None for step in steps
        ]
        kernels = set(_get_fused_kernels_supported_devices())
        # The fused kernel rounds the last few elements of a tensor otherwise than the others. Ranks that hold the same
        # elements in shards that are cut differently must come to the same: they take the foreach kernels.
        is_fused = all(step.shard is None and step.weights.device.type in kernels for step in steps)
        sgd(
            weights,
            [step.gradient for step in steps],
            velocities,
            fused=is_fused,
            foreach=not is_fused,
            weight_decay=0.0 if is_apart else group["weight_decay"],
            momentum=group["momentum"],
            lr=lr,
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        for step, velocity in zip(steps, velocities, strict=True) if keeps else ():
            step.state["momentum_buffer"] = velocity
