"""Adam updates of parameters on the CPU and on accelerators."""

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
    """Hyperparameters of a param group, named as in torch's param groups."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    bias_correction: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a param group.

        Raises:
            ConfigError: The group enables an unsupported variant.
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
    """Arguments of a step that all parameters share; see `FusedUpdate.fused_step`."""

    multiplier: float = 1.0
    multiplier_tensor: Tensor | None = None
    zero_grads: bool = False

    def multiplier_on(self, device: torch.device) -> Tensor | None:
        """Return `multiplier_tensor` as an fp32 scalar tensor on a device, or None if it is not set."""
        if self.multiplier_tensor is None:
            return None
        return self.multiplier_tensor.detach().to(device, torch.float32).reshape(())


@dataclass(slots=True, eq=False)
class ParameterUpdate:
    """Update of one parameter.

    Attributes:
        parameter: Parameter to update.
        gradient: Gradient of the parameter.
        working_copy: Low-precision copy that the updated parameter is rounded into, or None.
        state: Optimizer state of the parameter, complete; it contains the three tensors below.
        step: Number of steps so far.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
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
        """Number of steps, this one included."""
        return self.step.item() + 1


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """Updates that share their hyperparameters."""

    hyperparameters: Hyperparameters
    updates: list[ParameterUpdate]

    def part(self, updates: list[ParameterUpdate]) -> GroupUpdate:
        """Return a group of some of the updates, with the same hyperparameters."""
        return GroupUpdate(self.hyperparameters, updates)


def refuse_variants(group: Mapping[str, Any]) -> None:
    """Check that a param group enables neither AMSGrad nor differentiable updates.

    Raises:
        ConfigError: It does.
    """
    for variant in ("amsgrad", "differentiable"):
        if group.get(variant):
            raise ConfigError(
                f"{variant}=True in a param group is not supported by this optimizer: use torch.optim.AdamW, or set it"
                " to False"
            )


# Note [Memory order]
# Kernels treat tensors as flat memory, so parameter, gradient and states must have the same strides and no gaps: either
# contiguous or, as with channels_last, another dense order. A tensor with other strides is copied into its parameter's.


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous memory range without gaps or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def flat(tensor: Tensor) -> Tensor:
    """Return a 1-dim view of a dense tensor's memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(memory: Tensor, model: Tensor) -> Tensor:
    """Return a view of 1-dim memory with the shape and strides of a dense tensor."""
    return memory.view(model.shape) if model.is_contiguous() else memory.as_strided(model.shape, model.stride())


def laid_out_like(tensor: Tensor, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor itself, or a copy with the strides of `model` (contiguous if `model` has gaps).

    Args:
        tensor: Tensor of the shape of `model`.
        model: Tensor with the strides and device to match.
        dtype: dtype of the result; optional, defaults to the tensor's.
    """
    dtype = tensor.dtype if dtype is None else dtype
    is_same_order = tensor.is_contiguous() if model.is_contiguous() else tensor.stride() == model.stride()
    if is_same_order and tensor.dtype == dtype and tensor.device == model.device:
        return tensor
    return torch.empty_like(model, dtype=dtype, requires_grad=False).copy_(tensor)


@dataclass(slots=True, eq=False)
class Operands:
    """Kernel arguments for one parameter: flat tensors in the same memory order."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    working_copy: Tensor | None
    next_step: float


def update_on_host(group: GroupUpdate, arguments: StepArguments) -> None:
    """Update parameters and states in place, and increment the step counters.

    Args:
        group: Updates of CPU parameters, with complete states.
        arguments: Arguments of the step.
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
    """Call the CPU kernel once for all rows."""
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
    """Increment the step counters."""
    if updates:
        # 1 as a tensor: from a number, torch would create one tensor per parameter.
        torch._foreach_add_([update.step for update in updates], torch.ones(()), alpha=1.0)


def _is_plain(update: ParameterUpdate) -> bool:
    copy = update.working_copy
    # The moments have the parameter's strides.
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
    """Copy the kernel's results from reordered temporaries back into the original tensors."""
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
    """Launch the updates and increment the step counters, without synchronizing with the devices.

    Args:
        group: Updates of accelerator parameters, with complete states of the parameters' dtypes.
        arguments: Arguments of the step.
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
    # The kernel requires a single dtype, and unscales the gradients in place.
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
    torch.autograd.graph.increment_version(parameters)  # so that backward through the old values raises
    copies = [(update.working_copy, update.parameter) for update in updates if update.working_copy is not None]
    if copies:
        torch._foreach_copy_([copy for copy, _ in copies], [parameter for _, parameter in copies])
    if arguments.zero_grads:
        torch._foreach_zero_([update.gradient for update in updates])


def _step_numbers(updates: Sequence[ParameterUpdate], device: torch.device, *, corrects: bool) -> list[Tensor]:
    """Return the step numbers as device tensors, filled on the device, as copies would synchronize."""
    # An infinite step number disables bias correction: 1 - beta ** inf = 1.
    counts = [update.next_step if corrects else math.inf for update in updates]
    made = {count: torch.full((), count, dtype=torch.float32, device=device) for count in set(counts)}
    return [made[count] for count in counts]


def _divisor(arguments: StepArguments, device: torch.device) -> Tensor | None:
    """Return the divisor of the gradients (grad_scale of torch's fused kernels), or None."""
    factor = arguments.multiplier_on(device)
    if factor is None:
        if arguments.multiplier == 1.0:
            return None
        return torch.full((), 1.0 / arguments.multiplier, dtype=torch.float32, device=device)
    return (factor * arguments.multiplier).reciprocal()
