"""Updates parameters on an accelerator by torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from booster.optim.host_update import count_steps
from booster.optim.update import GroupUpdate, Hyperparameters, ParameterUpdate, StepArguments

__all__ = ["update_on_device"]


def update_on_device(group: GroupUpdate, arguments: StepArguments) -> None:
    """Starts the updates and counts the step; the host does not wait for the devices.

    Args:
        group: Parameters on accelerators, with complete states of the parameters' dtypes.
        arguments: Of the step.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[ParameterUpdate]] = {}
    for update in group.updates:
        if update.parameter.numel() > 0:
            alike.setdefault((update.parameter.device, update.parameter.dtype), []).append(update)
    for (device, _), updates in alike.items():
        _update_alike(updates, group.hyperparameters, arguments, device)
    count_steps(group.updates)


def _update_alike(
    updates: Sequence[ParameterUpdate],
    hyperparameters: Hyperparameters,
    arguments: StepArguments,
    device: torch.device,
) -> None:
    parameters = [update.parameter for update in updates]
    divisor = _divisor(arguments, device)
    # The kernel asks for one dtype of all, and where it divides the gradients it leaves them divided.
    copies_all = divisor is not None and not arguments.zero_grads
    gradients = [update.gradient.to(update.parameter.dtype, copy=copies_all) for update in updates]
    step = torch._fused_adamw_ if hyperparameters.decoupled_weight_decay else torch._fused_adam_
    lr = hyperparameters.lr
    step(
        parameters,
        gradients,
        [update.exp_avg for update in updates],
        [update.exp_avg_sq for update in updates],
        [],
        _step_numbers(updates, device, corrects=hyperparameters.bias_correction),
        lr=lr.to(device) if isinstance(lr, Tensor) and not lr.is_cpu else float(lr),
        beta1=hyperparameters.betas[0],
        beta2=hyperparameters.betas[1],
        weight_decay=hyperparameters.weight_decay,
        eps=hyperparameters.eps,
        amsgrad=False,
        maximize=hyperparameters.maximize,
        grad_scale=divisor,
        found_inf=None,
    )
    torch.autograd.graph.increment_version(parameters)  # so that graphs with their older values notice
    copies = [(update.working_copy, update.parameter) for update in updates if update.working_copy is not None]
    if copies:
        torch._foreach_copy_([copy for copy, _ in copies], [parameter for _, parameter in copies])
    if arguments.zero_grads:
        torch._foreach_zero_([update.gradient for update in updates])


def _step_numbers(updates: Sequence[ParameterUpdate], device: torch.device, *, corrects: bool) -> list[Tensor]:
    """Returns the number of each parameter's step on the device: made there, as a copy would wait for the device."""
    # After infinitely many steps there is nothing to correct: 1 - beta ** inf = 1.
    counts = [update.next_step if corrects else math.inf for update in updates]
    made = {count: torch.full((), count, dtype=torch.float32, device=device) for count in set(counts)}
    return [made[count] for count in counts]


def _divisor(arguments: StepArguments, device: torch.device) -> Tensor | None:
    """Returns what gradients are to be divided by; None: nothing."""
    factor = arguments.multiplier_on(device)
    if factor is None:
        if arguments.multiplier == 1.0:
            return None
        return torch.full((), 1.0 / arguments.multiplier, dtype=torch.float32, device=device)
    return (factor * arguments.multiplier).reciprocal()
