"""One step of Adam or AdamW over many tensors on the CPU, with all that surrounds it in the same pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch.autograd.graph import increment_version

from .adam_reference import AdamSettings, adam_reference
from .build import load_kernel

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum DType` in csrc/simd.h
_NO_WORKING_COPY = 15  # in csrc/adam.h
_STATE_DTYPE = torch.float32
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # others, as DTensor, may not be what lies at their address
_SEED_MASK = 2**64 - 1

_Row = tuple[int, int, int, int, int, int, int]  # Note [Table] in csrc/adam.cpp


def adam_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    working_copies: Sequence[torch.Tensor | None] | None = None,
    multiplier: float = 1.0,
    multiplier_tensor: torch.Tensor | None = None,
    zero_grads: bool = False,
    stochastic_rounding_seed: int | None = None,
) -> None:
    """Update parameters and states in place, by the formula of torch's fused Adam.

    The compiled kernel takes fp32, bf16 and fp16 parameters, gradients and working copies with fp32 states. Every other
    floating dtype, and a machine where the kernel can't be built, gets plain torch: the same results up to rounding.
    All tensors are contiguous and on the CPU. Not collective.

    Args:
        params: What to update; computed in fp32 and rounded to their dtype.
        grads: Their gradients, each of a dtype of its own.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: For each parameter the number of its steps, this one included.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: AdamW's; with `decoupled_weight_decay=False` Adam's, which is part of the gradient.
        decoupled_weight_decay: Whether it is AdamW.
        bias_correction: Whether the moments' start at zero is corrected for.
        working_copies: For each parameter a tensor of as many elements that gets the new value in its own dtype, or
            None. None: there are none.
        multiplier: The true gradient is `grad * multiplier * multiplier_tensor`.
        multiplier_tensor: One fp32 number, read while the step runs; None: 1.
        zero_grads: Whether the gradients become zero.
        stochastic_rounding_seed: bf16 parameters and working copies are rounded up or down by chance, so that they are
            right on average, with numbers that depend on this seed, the parameter's place in the list and the
            element's in the tensor. None: to the nearest.
    """
    copies = [None] * len(params) if working_copies is None else working_copies
    rows = [_row(*tensors) for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, copies, strict=True)]
    assert len(steps) == len(params), f"{len(steps)} step counts for {len(params)} parameters"
    _check_multiplier(multiplier_tensor)
    settings = AdamSettings(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        multiplier=multiplier,
        multiplier_tensor=multiplier_tensor,
        zero_grads=zero_grads,
        stochastic_rounding_seed=stochastic_rounding_seed,
    )
    native = None if None in rows else load_kernel("adam")
    if native is None:
        adam_reference(params, grads, exp_avgs, exp_avg_sqs, copies, steps, settings)
    else:
        native_adam(native, [row for row in rows if row is not None], steps, settings)
    # Kernels, torch's own too, write behind autograd's back; so graphs that hold older values of these tensors notice.
    increment_version([*params, *(copy for copy in copies if copy is not None), *(grads if zero_grads else ())])


def native_adam(
    native: ModuleType, rows: Sequence[_Row], steps: Sequence[float], settings: AdamSettings, instruction_set: str = ""
) -> None:
    """Call the compiled kernel.

    Args:
        native: Its module.
        rows: For each parameter its row of the kernel's table.
        steps: For each parameter the number of its steps.
        settings: What all of them share.
        instruction_set: One of `native.instruction_sets()`; "": the best.
    """
    beta1, beta2 = settings.betas
    multiplier_tensor = settings.multiplier_tensor
    seed = settings.stochastic_rounding_seed
    native.adam_step(
        [number for row in rows for number in row],
        [float(step) for step in steps],
        lr=float(settings.lr),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(settings.eps),
        weight_decay=float(settings.weight_decay),
        decoupled_weight_decay=settings.decoupled_weight_decay,
        bias_correction=settings.bias_correction,
        multiplier=float(settings.multiplier),
        multiplier_address=0 if multiplier_tensor is None else multiplier_tensor.data_ptr(),
        zero_grads=settings.zero_grads,
        rounds_stochastically=seed is not None,
        seed=(seed or 0) & _SEED_MASK,
        num_threads=torch.get_num_threads(),
        instruction_set=instruction_set,
    )


def _row(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor | None,
) -> _Row | None:
    """Return a parameter's row of the table; None if the kernel can't take them."""
    numel = param.numel()
    is_plain = True
    for tensor in (param, grad, exp_avg, exp_avg_sq) if copy is None else (param, grad, exp_avg, exp_avg_sq, copy):
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.numel() == numel):
            raise AssertionError(f"{_described(tensor)} with a parameter of {numel} elements")
        is_plain &= type(tensor) in _TENSOR_TYPES
    code, grad_code = _DTYPE_CODES.get(param.dtype), _DTYPE_CODES.get(grad.dtype)
    copy_code = _NO_WORKING_COPY if copy is None else _DTYPE_CODES.get(copy.dtype)
    if not is_plain or code is None or grad_code is None or copy_code is None:
        return None
    if exp_avg.dtype is not _STATE_DTYPE or exp_avg_sq.dtype is not _STATE_DTYPE:
        return None
    return (
        param.data_ptr(),
        grad.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        0 if copy is None else copy.data_ptr(),
        numel,
        code | grad_code << 4 | copy_code << 8,
    )


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of {tensor.numel()} elements on {tensor.device} with strides {tensor.stride()}"


def _check_multiplier(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        is_one_number = tensor.numel() == 1 and tensor.dtype is torch.float32 and tensor.is_cpu
        assert is_one_number, (
            f"the multiplier must be an fp32 number on the CPU, not {_described(tensor)}, {tensor.dtype}"
        )
