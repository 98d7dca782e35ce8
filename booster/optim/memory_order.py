"""Tensors as the plain stretches of memory that the kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flat", "is_dense", "laid_out_like", "shaped_like"]

# Note [Memory order]
# A kernel sees a tensor as one stretch of memory. Parameter, gradient and states must have their elements in the same
# order there, be it row by row or, as in channels_last, another one. Whatever comes in another order than its parameter
# is copied into the parameter's.


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the tensor's elements fill a stretch of memory, in any order, each of them once."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def flat(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's memory as one dimension."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(memory: Tensor, model: Tensor) -> Tensor:
    """Returns one-dimensional memory in the shape and the memory order of a dense tensor."""
    return memory.view(model.shape) if model.is_contiguous() else memory.as_strided(model.shape, model.stride())


def laid_out_like(tensor: Tensor, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor itself, or a copy of it in the memory order of `model` (row by row where that has gaps).

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
