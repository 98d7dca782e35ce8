"""Fused CPU kernel of Adam and AdamW for many tensors: unscale, update, cast and zero gradients in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch.autograd.graph import increment_version

from .adam_reference import AdamSettings, adam_reference
from .loader import load_kernel

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum DType` in csrc/simd.h
_NO_MODEL_PARAM = 15  # in csrc/adam.h
_STATE_DTYPE = torch.float32
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # data_ptr() of others, such as DTensor, may not be their data
_SEED_MASK = 2**64 - 1

_TableRow = tuple[int, int, int, int, int, int, int]  # Note [Table] in csrc/adam.cpp


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
    model_params: Sequence[torch.Tensor | None] | None = None,
    grad_scale: float = 1.0,
    clip_coef: torch.Tensor | None = None,
    zero_grads: bool = False,
    stochastic_rounding_seed: int | None = None,
) -> None:
    """Update parameters and states in place, with the formula of torch's fused Adam.

    The compiled kernel supports fp32, bf16 and fp16 parameters, gradients and working copies with fp32 states. Other
    floating dtypes, and machines where the kernel can't be built, use plain torch: the same results up to rounding.
    All tensors are contiguous and on the CPU. Not collective.

    Args:
        params: Parameters; computed in fp32 and rounded to their dtype.
        grads: Gradients; dtypes may differ from the parameters' and from each other.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Step number of each parameter, this step included.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay.
        decoupled_weight_decay: If True, AdamW's weight decay; if False, Adam's L2 term in the gradient.
        bias_correction: If True, the moments are corrected for their initialization to zero.
        model_params: Tensor per parameter that receives the new value in its own dtype, or None for a parameter
            without one; optional, defaults to no copies.
        grad_scale: Factor of the gradient: the unscaled one is `grad * grad_scale * clip_coef`.
        clip_coef: fp32 tensor with one element, read during the step; optional, defaults to 1.
        zero_grads: If True, the gradients are set to zero.
        stochastic_rounding_seed: Seed of stochastic rounding of bf16 parameters and working copies. The random numbers
            depend on the seed, the parameter's index in the list and the element's index in the tensor. Optional,
            defaults to rounding to nearest.
    """
    copies = [None] * len(params) if model_params is None else model_params
    rows = [_row(*tensors) for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, copies, strict=True)]
    assert len(steps) == len(params), f"{len(steps)} step counts for {len(params)} parameters"
    _check_clip_coef(clip_coef)
    settings = AdamSettings(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        zero_grads=zero_grads,
        stochastic_rounding_seed=stochastic_rounding_seed,
    )
    native = None if None in rows else load_kernel("adam")
    if native is None:
        adam_reference(params, grads, exp_avgs, exp_avg_sqs, copies, steps, settings)
    else:
        native_adam(native, [row for row in rows if row is not None], steps, settings)
    # Kernels bypass autograd's version counters; with new versions, backward through the old values raises an error.
    increment_version([*params, *(copy for copy in copies if copy is not None), *(grads if zero_grads else ())])


def native_adam(
    native: ModuleType,
    rows: Sequence[_TableRow],
    steps: Sequence[float],
    settings: AdamSettings,
    instruction_set: str = "",
) -> None:
    """Call the compiled kernel.

    Args:
        native: Module of the kernel.
        rows: Row of the kernel's table for each parameter.
        steps: Step number of each parameter.
        settings: Settings shared by all parameters.
        instruction_set: One of `native.instruction_sets()`, or "" for the best.
    """
    beta1, beta2 = settings.betas
    clip_coef = settings.clip_coef
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
        multiplier=float(settings.grad_scale),
        multiplier_address=0 if clip_coef is None else clip_coef.data_ptr(),
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
) -> _TableRow | None:
    """Return a parameter's row of the kernel's table, or None if the kernel does not support its tensors."""
    numel = param.numel()
    is_supported = True
    for tensor in (param, grad, exp_avg, exp_avg_sq) if copy is None else (param, grad, exp_avg, exp_avg_sq, copy):
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.numel() == numel):
            raise AssertionError(f"{_described(tensor)} with a parameter of {numel} elements")
        is_supported &= type(tensor) in _TENSOR_TYPES
    code, grad_code = _DTYPE_CODES.get(param.dtype), _DTYPE_CODES.get(grad.dtype)
    copy_code = _NO_MODEL_PARAM if copy is None else _DTYPE_CODES.get(copy.dtype)
    if not is_supported or code is None or grad_code is None or copy_code is None:
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


def _check_clip_coef(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        is_scalar = tensor.numel() == 1 and tensor.dtype is torch.float32 and tensor.is_cpu
        assert is_scalar, f"the multiplier must be an fp32 CPU scalar, got {_described(tensor)}, {tensor.dtype}"
