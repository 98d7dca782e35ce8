"""What one step has to do, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigError

__all__ = ["MOMENTS", "GroupUpdate", "Hyperparameters", "ParameterUpdate", "StepArguments", "refuse_variants"]

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """How a group's parameters are updated; names as in torch's groups."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    bias_correction: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """Returns what a param group says.

        Raises:
            ConfigError: It asks for a variant that there is not.
        """
        refuse_variants(group)
        beta1, beta2 = group["betas"]
        return cls(
            lr=group["lr"],
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled_weight_decay=bool(group["decoupled_weight_decay"]),
            bias_correction=bool(group.get("bias_correction", True)),
            maximize=bool(group["maximize"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepArguments:
    """What of a step all parameters share; see `FusedUpdate.fused_step`."""

    multiplier: float = 1.0
    multiplier_tensor: Tensor | None = None
    zero_grads: bool = False

    def multiplier_on(self, device: torch.device) -> Tensor | None:
        """Returns the factor that the host does not know as an fp32 number on a device."""
        if self.multiplier_tensor is None:
            return None
        return self.multiplier_tensor.detach().to(device, torch.float32).reshape(())


@dataclass(slots=True, eq=False)
class ParameterUpdate:
    """A parameter and all that its update needs.

    Attributes:
        parameter: What is updated.
        gradient: Its gradient.
        working_copy: What the updated parameter is rounded into; None: nothing.
        state: The optimizer's state of it, complete; the three that follow are in it.
        step: The number of steps so far.
        exp_avg: The first moment.
        exp_avg_sq: The second moment.
    """

    parameter: Tensor
    gradient: Tensor
    working_copy: Tensor | None
    state: dict[str, Any]
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def next_step(self) -> float:
        """The number of steps, this one included."""
        return self.step.item() + 1


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """Parameters that share their hyperparameters."""

    hyperparameters: Hyperparameters
    updates: list[ParameterUpdate]

    def part(self, updates: list[ParameterUpdate]) -> GroupUpdate:
        """Returns some of the updates, with the same hyperparameters."""
        return GroupUpdate(self.hyperparameters, updates)


def refuse_variants(group: Mapping[str, Any]) -> None:
    """Returns if a param group asks for plain Adam or AdamW.

    Raises:
        ConfigError: It does not.
    """
    for variant in ("amsgrad", "differentiable"):
        if group.get(variant):
            raise ConfigError(
                f"{variant}=True in a param group is not offered by this optimizer: use torch.optim.AdamW, or set it to"
                " False"
            )
