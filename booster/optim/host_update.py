"""Updates parameters on the CPU whose states are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from booster.kernels.adam import adam_step
from booster.optim.memory_order import flat, is_dense, laid_out_like, shaped_like
from booster.optim.update import GroupUpdate, Hyperparameters, ParameterUpdate, StepArguments

__all__ = ["Operands", "count_steps", "run_kernel", "update_on_host"]


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
    """Updates parameters and states in place, and counts the step.

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
    """Calls the kernel once for all rows."""
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
    """Adds one to the step numbers."""
    if updates:
        # The number as a tensor: torch would make one of it for every parameter.
        torch._foreach_add_([update.step for update in updates], torch.ones(()), alpha=1.0)


def _is_plain(update: ParameterUpdate) -> bool:
    """Returns whether all tensors are row by row, as is usual."""
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
    """Copies what the kernel wrote into memory in another order to where it belongs."""
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
