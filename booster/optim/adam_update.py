"""Adam updates of parameters on the CPU and on accelerators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from booster.comm import host_value
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
    def from_group(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a param group; raise `ConfigError` if it enables an unsupported variant."""
        check_no_variants(group)
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

    grad_scale: float = 1.0
    clip_coef: Tensor | None = None
    zero_grads: bool = False

    def clip_coef_on(self, device: torch.device) -> Tensor | None:
        """Return `clip_coef` as an fp32 scalar tensor on a device, or None if it is not set."""
        if self.clip_coef is None:
            return None
        return self.clip_coef.detach().to(device, torch.float32).reshape(())


@dataclass(slots=True, eq=False)
class AdamParamUpdate:
    """Update of one parameter.

    Attributes:
        parameter: Parameter to update.
        gradient: Gradient of the parameter.
        model_param: Low-precision copy that the updated parameter is rounded into, or None.
        state: Optimizer state of the parameter, complete; it contains the three tensors below.
        step: Number of steps so far.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
    """

    parameter: Tensor
    gradient: Tensor
    model_param: Tensor | None
    state: dict[str, Any]
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def next_step(self) -> float:
        """Number of steps, this one included."""
        return host_value(self.step) + 1


@dataclass(frozen=True, slots=True)
class AdamGroupUpdate:
    """Updates that share their hyperparameters."""

    hyperparameters: Hyperparameters
    updates: list[AdamParamUpdate]


def check_no_variants(group: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a param group enables AMSGrad or differentiable updates."""
    for variant in ("amsgrad", "differentiable"):
        if group.get(variant):
            raise ConfigError(
                f"{variant}=True in a param group is not supported by this optimizer: use torch.optim.AdamW, or set it"
                " to False"
            )


# Note [Memory layout of kernel arguments]
# Kernels treat tensors as flat memory, so parameter, gradient and states must have the same strides and no gaps: either
# contiguous or, as with channels_last, another dense order. A tensor with other strides is copied into its parameter's.


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous memory range without gaps or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def flat_view(tensor: Tensor) -> Tensor:
    """Return a 1-dim view of a dense tensor's memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def view_like(memory: Tensor, like: Tensor) -> Tensor:
    """Return a view of 1-dim memory with the shape and strides of a dense tensor."""
    return memory.view(like.shape) if like.is_contiguous() else memory.as_strided(like.shape, like.stride())


def match_strides(tensor: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor itself, or a copy with the strides of `like` (contiguous if `like` has gaps).

    Args:
        tensor: Tensor of the shape of `like`.
        like: Tensor with the strides and device to match.
        dtype: dtype of the result; optional, defaults to the tensor's.
    """
    dtype = tensor.dtype if dtype is None else dtype
    is_same_order = tensor.is_contiguous() if like.is_contiguous() else tensor.stride() == like.stride()
    if is_same_order and tensor.dtype == dtype and tensor.device == like.device:
        return tensor
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


@dataclass(slots=True, eq=False)
class KernelArguments:
    """Kernel arguments for one parameter: flat tensors in the same memory order."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model_param: Tensor | None
    next_step: float


def update_on_host(group: AdamGroupUpdate, arguments: StepArguments) -> None:
    """Update parameters and states in place, and increment the step counters.

    Args:
        group: Updates of CPU parameters, with complete states.
        arguments: Arguments of the step.
    """
    rows = [_kernel_arguments(update) for update in group.updates]
    run_kernel(rows, group.hyperparameters, arguments)
    for row, update in zip(rows, group.updates, strict=True):
        if isinstance(row, KernelArguments):
            _write_back(row, update, arguments)
    increment_steps(group.updates)


def run_kernel(
    rows: Sequence[KernelArguments | AdamParamUpdate], hyperparameters: Hyperparameters, arguments: StepArguments
) -> None:
    """Call the CPU kernel once for all rows."""
    copies = [row.model_param for row in rows]
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
        model_params=None if all(copy is None for copy in copies) else copies,
        grad_scale=-arguments.grad_scale if hyperparameters.maximize else arguments.grad_scale,
        clip_coef=arguments.clip_coef_on(torch.device("cpu")),
        zero_grads=arguments.zero_grads,
    )


def increment_steps(updates: Sequence[AdamParamUpdate]) -> None:
    if updates:
        # 1 as a tensor: from a number, torch would create one tensor per parameter.
        torch._foreach_add_([update.step for update in updates], torch.ones(()), alpha=1.0)


def _kernel_arguments(update: AdamParamUpdate) -> KernelArguments | AdamParamUpdate:
    """Return the update itself if its tensors are contiguous, else flat tensors of it."""
    parameter, copy = update.parameter, update.model_param
    # The moments have the parameter's strides.
    is_contiguous = parameter.is_contiguous() and update.gradient.is_contiguous()
    if is_contiguous and (copy is None or copy.is_contiguous()):
        return update
    like = parameter if is_dense(parameter) else parameter.contiguous()
    return KernelArguments(
        flat_view(like),
        flat_view(match_strides(update.gradient, like)),
        flat_view(match_strides(update.exp_avg, like)),
        flat_view(match_strides(update.exp_avg_sq, like)),
        None if copy is None else flat_view(match_strides(copy, like)),
        update.next_step,
    )


def _write_back(row: KernelArguments, update: AdamParamUpdate, arguments: StepArguments) -> None:
    """Copy the kernel's results from reordered temporaries back into the original tensors."""
    like = update.parameter if is_dense(update.parameter) else update.parameter.contiguous()
    pairs = [
        (update.parameter, row.parameter),
        (update.exp_avg, row.exp_avg),
        (update.exp_avg_sq, row.exp_avg_sq),
    ]
    if update.model_param is not None and row.model_param is not None:
        pairs.append((update.model_param, row.model_param))
    if arguments.zero_grads:
        pairs.append((update.gradient, row.gradient))
    for tensor, memory in pairs:
        if tensor.data_ptr() != memory.data_ptr():
            tensor.copy_(view_like(memory, like))


def update_on_device(group: AdamGroupUpdate, arguments: StepArguments) -> None:
    """Launch the updates and increment the step counters, without synchronizing with the devices.

    Args:
        group: Updates of accelerator parameters, with complete states of the parameters' dtypes.
        arguments: Arguments of the step.
    """
    by_device_and_dtype: dict[tuple[torch.device, torch.dtype], list[AdamParamUpdate]] = {}
    for update in group.updates:
        if update.parameter.numel() > 0:
            by_device_and_dtype.setdefault((update.parameter.device, update.parameter.dtype), []).append(update)
    for (device, _), updates in by_device_and_dtype.items():
        _update_same_dtype(updates, group.hyperparameters, arguments, device)
    increment_steps(group.updates)


def _update_same_dtype(
    updates: Sequence[AdamParamUpdate],
    hyperparameters: Hyperparameters,
    arguments: StepArguments,
    device: torch.device,
) -> None:
    parameters = [update.parameter for update in updates]
    divisor = _inv_grad_scale(arguments, device)
    # The kernel requires a single dtype, and unscales the gradients in place.
    must_copy = divisor is not None and not arguments.zero_grads
    gradients = [update.gradient.to(update.parameter.dtype, copy=must_copy) for update in updates]
    # An infinite step number disables bias correction: 1 - beta ** inf = 1.
    step_numbers = [update.next_step if hyperparameters.bias_correction else math.inf for update in updates]
    # Filled on the device, as copies would synchronize.
    step_tensors = {number: torch.full((), number, dtype=torch.float32, device=device) for number in set(step_numbers)}
    step = torch._fused_adamw_ if hyperparameters.decoupled_weight_decay else torch._fused_adam_
    lr = hyperparameters.lr
    step(
        parameters,
        gradients,
        [update.exp_avg for update in updates],
        [update.exp_avg_sq for update in updates],
        [],
        [step_tensors[number] for number in step_numbers],
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
    copies = [(update.model_param, update.parameter) for update in updates if update.model_param is not None]
    if copies:
        torch._foreach_copy_([copy for copy, _ in copies], [parameter for _, parameter in copies])
    if arguments.zero_grads:
        torch._foreach_zero_([update.gradient for update in updates])


def _inv_grad_scale(arguments: StepArguments, device: torch.device) -> Tensor | None:
    """Return the divisor of the gradients (grad_scale of torch's fused kernels), or None."""
    clip_coef = arguments.clip_coef_on(device)
    if clip_coef is None:
        if arguments.grad_scale == 1.0:
            return None
        return torch.full((), 1.0 / arguments.grad_scale, dtype=torch.float32, device=device)
    return (clip_coef * arguments.grad_scale).reciprocal()
