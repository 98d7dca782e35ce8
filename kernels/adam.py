"""Fused CPU kernel of Adam and AdamW for many tensors: unscale, update, cast and zero gradients in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version

from .loader import load_kernel

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
_DISCARDED_BITS = 16  # low bits of fp32 that bf16 discards
_QUIET_NAN = 0x400000


def round_stochastically(values: torch.Tensor, seed: int, tensor_index: int = 0, begin: int = 0) -> torch.Tensor:
    """Round fp32 values to bf16 stochastically: to one of the two neighbors, with probabilities that keep the mean.

    Values that bf16 can represent, inf and nan included, do not change. Values above the largest finite number become
    inf with the corresponding probability.

    Args:
        values: Contiguous 1-dim fp32 tensor; its range of element indices crosses no multiple of 2**32.
        seed: Any integer.
        tensor_index: Index of the tensor among those with the same seed.
        begin: Index of the first value within its tensor.
    """
    bits = values.view(torch.int32).to(torch.int64) & _MASK_32
    random = _random_numbers(values.numel(), seed, tensor_index, begin)
    rounded = torch.where(values.isnan(), bits | _QUIET_NAN, bits + (random >> _DISCARDED_BITS))
    return (rounded >> _DISCARDED_BITS).to(torch.int16).view(torch.bfloat16)


def _random_numbers(count: int, seed: int, tensor_index: int, begin: int) -> torch.Tensor:
    """Return 32 random bits per element, as int64."""
    key = _mixed(_mixed(seed + tensor_index * 0xD1342543DE82EF95) + (begin >> 32))
    first = begin & _MASK_32
    x = torch.arange(first, first + count, dtype=torch.int64) ^ (key & _MASK_32)
    x = _product(x ^ (x >> 16), 0x7FEB352D)
    x = x ^ (key >> 32)
    x = _product(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the lower 32 bits of the product, which an overflow of the upper ones does not change."""
    return (x * factor) & _MASK_32


def _mixed(x: int) -> int:
    """The hash "splitmix64"."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


_BLOCK_ELEMENTS = 512 * 1024  # with smaller blocks the overhead of the operations exceeds the gain of the caches


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Arguments of `booster.kernels.adam.adam_step` that all tensors share."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool = True
    bias_correction: bool = True
    grad_scale: float = 1.0
    clip_coef: torch.Tensor | None = None
    zero_grads: bool = False
    stochastic_rounding_seed: int | None = None


class _ParamRange(NamedTuple):
    """Element range of one parameter and its related tensors."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None
    step: torch.Tensor
    tensor_index: int
    begin: int


@torch.no_grad()
def adam_reference(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None],
    steps: Sequence[float],
    settings: AdamSettings,
) -> None:
    """Run `booster.kernels.adam.adam_step` for any floating-point dtypes, in fp64 if one of them is fp64."""
    grad_scale = settings.grad_scale
    if settings.clip_coef is not None:
        grad_scale *= float(settings.clip_coef)
    # An infinite step number disables bias correction.
    counts = steps if settings.bias_correction else [torch.inf] * len(steps)
    scratch = torch.empty(0)
    for dtype, block in _blocks(_param_ranges(params, grads, exp_avgs, exp_avg_sqs, copies, counts)):
        # Reused for all blocks, as page faults of new memory take longer than the computation.
        numel = sum(param_range.param.numel() for param_range in block)
        if scratch.dtype is not dtype or scratch.numel() < numel:
            scratch = torch.empty(numel, dtype=dtype)
        _update(block, scratch, grad_scale, settings)


def _param_ranges(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None],
    counts: Sequence[float],
) -> Iterator[_ParamRange]:
    """Split the tensors into ranges of at most one block."""
    lists = zip(params, grads, exp_avgs, exp_avg_sqs, copies, counts, strict=True)
    for tensor_index, (*tensors, copy, count) in enumerate(lists):
        ranges = zip(*(_split(tensor) for tensor in tensors), strict=True)
        copy_ranges = itertools.repeat(None) if copy is None else _split(copy)
        step = torch.tensor(float(count))
        for index, (tensor_range, copy_range) in enumerate(zip(ranges, copy_ranges, strict=False)):
            param, grad, exp_avg, exp_avg_sq = tensor_range
            if param.numel() > 0:
                begin = index * _BLOCK_ELEMENTS
                yield _ParamRange(param, grad, exp_avg, exp_avg_sq, copy_range, step, tensor_index, begin)


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.detach().view(-1), _BLOCK_ELEMENTS)


def _blocks(ranges: Iterator[_ParamRange]) -> Iterator[tuple[torch.dtype, list[_ParamRange]]]:
    """Group small ranges with the same compute dtype, up to one block."""
    block: list[_ParamRange] = []
    dtype, size = torch.float32, 0
    for param_range in ranges:
        dtypes = (param_range.param.dtype, param_range.exp_avg.dtype, param_range.exp_avg_sq.dtype)
        range_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        if block and (range_dtype is not dtype or size + param_range.param.numel() > _BLOCK_ELEMENTS):
            yield dtype, block
            block, size = [], 0
        block.append(param_range)
        dtype, size = range_dtype, size + param_range.param.numel()
    if block:
        yield dtype, block


def _update(block: list[_ParamRange], scratch: torch.Tensor, grad_scale: float, settings: AdamSettings) -> None:
    dtype, seed = scratch.dtype, settings.stochastic_rounding_seed
    # `to` returns the tensor itself if it has the dtype already; then it is updated in place.
    params = [param_range.param.to(dtype) for param_range in block]
    exp_avgs = [param_range.exp_avg.to(dtype) for param_range in block]
    exp_avg_sqs = [param_range.exp_avg_sq.to(dtype) for param_range in block]
    _fused_update(params, _unscaled_gradients(block, scratch, grad_scale), exp_avgs, exp_avg_sqs, block, settings)
    for param_range, param, exp_avg, exp_avg_sq in zip(block, params, exp_avgs, exp_avg_sqs, strict=True):
        for state, updated in ((param_range.exp_avg, exp_avg), (param_range.exp_avg_sq, exp_avg_sq)):
            if state is not updated:
                state.copy_(updated)
        for result in (param_range.param, param_range.copy):
            if result is None or result is param:
                continue
            if seed is not None and result.dtype is torch.bfloat16:
                result.copy_(round_stochastically(param.float(), seed, param_range.tensor_index, param_range.begin))
            else:
                result.copy_(param)
        if settings.zero_grads:
            param_range.grad.zero_()


def _unscaled_gradients(block: Sequence[_ParamRange], scratch: torch.Tensor, grad_scale: float) -> list[torch.Tensor]:
    if grad_scale == 1.0 and all(param_range.grad.dtype is scratch.dtype for param_range in block):
        return [param_range.grad for param_range in block]
    sizes = [param_range.grad.numel() for param_range in block]
    grads = list(scratch[: sum(sizes)].split(sizes))
    # Cast first, as a product of bf16 numbers would be rounded to bf16.
    for grad, param_range in zip(grads, block, strict=True):
        grad.copy_(param_range.grad).mul_(grad_scale)
    return grads


def _fused_update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    block: Sequence[_ParamRange],
    settings: AdamSettings,
) -> None:
    update = torch._fused_adamw_ if settings.decoupled_weight_decay else torch._fused_adam_
    update(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [param_range.step for param_range in block],
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
    )


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
    if clip_coef is not None:
        is_scalar = clip_coef.numel() == 1 and clip_coef.dtype is torch.float32 and clip_coef.is_cpu
        assert is_scalar, f"the multiplier must be an fp32 CPU scalar, got {_described(clip_coef)}, {clip_coef.dtype}"
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
    if params and isinstance(params[0], FakeTensor):
        return  # the kernel allocates nothing
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
