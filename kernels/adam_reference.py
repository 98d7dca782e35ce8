"""Reference implementation of the Adam kernel in plain torch, in cache-sized blocks, and stochastic rounding.

The compiled kernel's single pass is a sequence of torch operations here: cast and scale the gradient, fused update,
write the working copy, zero the gradient. Running them block by block keeps the data in the caches between operations.
Tests compare the kernel with this implementation.

Stochastic rounding from fp32 to bf16 is unbiased: bf16 has 8 significant bits, so rounding to nearest would lose every
update below 1/256 of a weight. Rounding up with a probability equal to the discarded fraction keeps the mean.

The random numbers are a hash of seed, tensor index and element index, so they are reproducible for any number of
threads and any order of evaluation; csrc/adam_vector.cpp has the same hash, Note [Random numbers].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

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
        range_dtype = _compute_dtype(param_range)
        if block and (range_dtype is not dtype or size + param_range.param.numel() > _BLOCK_ELEMENTS):
            yield dtype, block
            block, size = [], 0
        block.append(param_range)
        dtype, size = range_dtype, size + param_range.param.numel()
    if block:
        yield dtype, block


def _compute_dtype(param_range: _ParamRange) -> torch.dtype:
    dtypes = (param_range.param.dtype, param_range.exp_avg.dtype, param_range.exp_avg_sq.dtype)
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _update(block: list[_ParamRange], scratch: torch.Tensor, grad_scale: float, settings: AdamSettings) -> None:
    dtype = scratch.dtype
    params = [_in_dtype(param_range.param, dtype) for param_range in block]
    exp_avgs = [_in_dtype(param_range.exp_avg, dtype) for param_range in block]
    exp_avg_sqs = [_in_dtype(param_range.exp_avg_sq, dtype) for param_range in block]
    _fused_update(params, _unscaled_gradients(block, scratch, grad_scale), exp_avgs, exp_avg_sqs, block, settings)
    for param_range, param, exp_avg, exp_avg_sq in zip(block, params, exp_avgs, exp_avg_sqs, strict=True):
        _write_back(param_range.exp_avg, exp_avg)
        _write_back(param_range.exp_avg_sq, exp_avg_sq)
        for result in (param_range.param, param_range.copy):
            if result is not None:
                _write_result(result, param, param_range, settings.stochastic_rounding_seed)
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


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _write_back(to: torch.Tensor, values: torch.Tensor) -> None:
    if to is not values:
        to.copy_(values)


def _write_result(to: torch.Tensor, values: torch.Tensor, param_range: _ParamRange, seed: int | None) -> None:
    if seed is None or to.dtype is not torch.bfloat16:
        _write_back(to, values)
    else:
        to.copy_(round_stochastically(values.float(), seed, param_range.tensor_index, param_range.begin))
