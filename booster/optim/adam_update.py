"""What one step has to do, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigError
from booster.kernels.adam import adam_step

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
        """Return what a param group says.

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
        """Return the factor that the host does not know as an fp32 number on a device."""
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
        """Return some of the updates, with the same hyperparameters."""
        return GroupUpdate(self.hyperparameters, updates)


def refuse_variants(group: Mapping[str, Any]) -> None:
    """Return if a param group asks for plain Adam or AdamW.

    Raises:
        ConfigError: It does not.
    """
    for variant in ("amsgrad", "differentiable"):
        if group.get(variant):
            raise ConfigError(
                f"{variant}=True in a param group is not offered by this optimizer: use torch.optim.AdamW, or set it to"
                " False"
            )


# Note [Memory order]
# A kernel sees a tensor as one stretch of memory. Parameter, gradient and states must have their elements in the same
# order there, be it row by row or, as in channels_last, another one. Whatever comes in another order than its parameter
# is copied into the parameter's.


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill a stretch of memory, in any order, each of them once."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as one dimension."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(memory: Tensor, model: Tensor) -> Tensor:
    """Return one-dimensional memory in the shape and the memory order of a dense tensor."""
    return memory.view(model.shape) if model.is_contiguous() else memory.as_strided(model.shape, model.stride())


def laid_out_like(tensor: Tensor, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor itself, or a copy of it in the memory order of `model` (row by row where that has gaps).

    Args:
        tensor: What to look at; of the shape of `model`.
        model: Whose order counts.
        dtype: Convert to this one; None: leave it.
    """
    dtype = tensor.dtype if dtype is None else dtype
    is_same_order = tensor.is_contiguous() if model.is_contiguous() else tensor.stride() == model.stride()
    if is_same_order and tensor.dtype == dtype and tensor.device == model.device:
        return tensor
    return torch.empty_like(model, dtype=dtype, requires_grad=False).copy_(tensor)


@dataclass(slots=True, eq=False)
class Operands:
    """One row of the kernel's arguments: stretches of memory in the same order."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    working_copy: Tensor | None
    next_step: float


def update_on_host(group: GroupUpdate, arguments: StepArguments) -> None:
    """Update parameters and states in place, and count the step.

    Args:
        group: Parameters on the CPU, with complete states.
        arguments: Of the step.
    """
    rows = [update if _is_plain(update) else _operands(update) for update in group.updates]
    run_kernel(rows, group.hyperparameters, arguments)
    for row, update in zip(rows, group.updates, strict=True):
        if isinstance(row, Operands):
            _write_back(row, update, arguments)
    count_steps(group.updates)


def run_kernel(
    rows: Sequence[Operands | ParameterUpdate], hyperparameters: Hyperparameters, arguments: StepArguments
) -> None:
    """Call the kernel once for all rows."""
    copies = [row.working_copy for row in rows]
    adam_step(
        [row.parameter for row in rows],
        [row.gradient for row in rows],
        [row.exp_avg for row in rows],
        [row.exp_avg_sq for row in rows],
        [row.next_step for row in rows],
        lr=float(hyperparameters.lr),
        betas=hyperparameters.betas,
        eps=hyperparameters.eps,
        weight_decay=hyperparameters.weight_decay,
        decoupled_weight_decay=hyperparameters.decoupled_weight_decay,
        bias_correction=hyperparameters.bias_correction,
        working_copies=None if all(copy is None for copy in copies) else copies,
        multiplier=-arguments.multiplier if hyperparameters.maximize else arguments.multiplier,
        multiplier_tensor=arguments.multiplier_on(torch.device("cpu")),
        zero_grads=arguments.zero_grads,
    )


def count_steps(updates: Sequence[ParameterUpdate]) -> None:
    """Add one to the step numbers."""
    if updates:
        # The number as a tensor: torch would make one of it for every parameter.
        torch._foreach_add_([update.step for update in updates], torch.ones(()), alpha=1.0)


def _is_plain(update: ParameterUpdate) -> bool:
    """Return whether all tensors are row by row, as is usual."""
    copy = update.working_copy
    # The moments are as the parameter.
    is_plain = update.parameter.is_contiguous() and update.gradient.is_contiguous()
    return is_plain and (copy is None or copy.is_contiguous())


def _operands(update: ParameterUpdate) -> Operands:
    parameter, copy = update.parameter, update.working_copy
    model = parameter if is_dense(parameter) else parameter.contiguous()
    return Operands(
        flat(model),
        flat(laid_out_like(update.gradient, model)),
        flat(laid_out_like(update.exp_avg, model)),
        flat(laid_out_like(update.exp_avg_sq, model)),
        None if copy is None else flat(laid_out_like(copy, model)),
        update.next_step,
    )


def _write_back(row: Operands, update: ParameterUpdate, arguments: StepArguments) -> None:
    """Copy what the kernel wrote into memory in another order to where it belongs."""
    model = update.parameter if is_dense(update.parameter) else update.parameter.contiguous()
    pairs = [
        (update.parameter, row.parameter),
        (update.exp_avg, row.exp_avg),
        (update.exp_avg_sq, row.exp_avg_sq),
    ]
    if update.working_copy is not None and row.working_copy is not None:
        pairs.append((update.working_copy, row.working_copy))
    if arguments.zero_grads:
        pairs.append((update.gradient, row.gradient))
    for tensor, memory in pairs:
        if tensor.data_ptr() != memory.data_ptr():
            tensor.copy_(shaped_like(memory, model))


def update_on_device(group: GroupUpdate, arguments: StepArguments) -> None:
    """Start the updates and count the step; the host does not wait for the devices.

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
    """Return the number of each parameter's step on the device: made there, as a copy would wait for the device."""
    # After infinitely many steps there is nothing to correct: 1 - beta ** inf = 1.
    counts = [update.next_step if corrects else math.inf for update in updates]
    made = {count: torch.full((), count, dtype=torch.float32, device=device) for count in set(counts)}
    return [made[count] for count in counts]


def _divisor(arguments: StepArguments, device: torch.device) -> Tensor | None:
    """Return what gradients are to be divided by; None: nothing."""
    factor = arguments.multiplier_on(device)
    if factor is None:
        if arguments.multiplier == 1.0:
            return None
        return torch.full((), 1.0 / arguments.multiplier, dtype=torch.float32, device=device)
    return (factor * arguments.multiplier).reciprocal()
