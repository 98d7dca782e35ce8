"""Norms, packing and unpacking of many tensors in one pass over their memory.

Operations are compiled only where that measured at least 1.3 times as fast as torch. This holds for sums of squares,
which detect inf and nan in the same pass. It holds for copies that scale and convert more data than the caches hold, as
torch takes two passes for these. Single-pass copies are limited by memory bandwidth in torch as well, and for tiny
tensors collecting the addresses costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version

from .loader import load_kernel

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum DType` in csrc/simd.h
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # data_ptr() of others, such as DTensor, may not be their data
_BLOCK_NUMEL = 2**16  # block of the reference's sums; in fp64 it fits into the cache
_MIN_NUMEL, _MIN_NUMEL_PER_TENSOR = 2**22, 2**15  # minimum of elements for a compiled copy: in total, and on average


def supports_sum_of_squares(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether `sum_of_squares` uses the kernel: it is available, and all tensors are plain CPU ones.

    These are contiguous fp32, bf16 or fp16 tensors.
    """
    if _are_fake(tensors):
        return True  # no values are read
    return all(map(_is_supported, tensors)) and load_kernel("flat_buffers") is not None


@torch.no_grad()
def sum_of_squares(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements; for dtypes up to fp32 it is finite exactly if all elements are.

    The sum is in fp64, so that squares do not overflow. The compiled sum is bitwise equal for any number of threads and
    on any CPU. It adds squares of 16-bit elements in groups of four in fp32, with a relative error below 2**-22.

    Args:
        tensors: Floating-point tensors; `supports_sum_of_squares` returns whether the kernel supports them.
    """
    if _are_fake(tensors):
        return 1.0
    table = _table(tensors)
    native = None if table is None else load_kernel("flat_buffers")
    if native is None:
        return sum(map(_reference_sum, tensors), 0.0)
    return float(native.sum_of_squares(table, torch.get_num_threads(), ""))


@torch.no_grad()
def pack(tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float = 1.0) -> None:
    """Write `scale * tensor` of each tensor, one after the other, into a flat buffer.

    Products are rounded to fp32 and then to the buffer's dtype.

    Args:
        tensors: Tensors on the buffer's device.
        flat: Floating-point buffer with as many elements as all tensors together.
        scale: Factor.
    """
    views = _split(flat, tensors)
    if _are_fake([flat]):
        return
    table = _copy_table(tensors, flat, scale)
    native = None if table is None else load_kernel("flat_buffers")
    if native is None:
        _reference_copies(tensors, [part.view(one.shape) for part, one in zip(views, tensors, strict=True)], scale)
    else:
        native.pack(table, *_arguments(flat, scale))
        increment_version(flat)  # the kernel bypasses autograd's version counters


@torch.no_grad()
def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Write `scale` times the ranges of a flat buffer into tensors; the inverse of `pack`.

    Args:
        flat: Floating-point buffer with as many elements as all tensors together.
        tensors: Tensors on the buffer's device.
        scale: Factor.
    """
    views = _split(flat, tensors)
    if _are_fake([flat]):
        return
    table = _copy_table(tensors, flat, scale)
    native = None if table is None else load_kernel("flat_buffers")
    if native is None:
        _reference_copies([part.view(one.shape) for part, one in zip(views, tensors, strict=True)], tensors, scale)
    else:
        native.unpack(table, *_arguments(flat, scale))
        increment_version(tensors)


def _are_fake(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and isinstance(tensors[0], FakeTensor)


def _is_supported(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can access the elements: contiguous at `data_ptr()`, without lazy negation."""
    return (
        type(tensor) in _TENSOR_TYPES
        and tensor.is_cpu
        and tensor.dtype in _DTYPE_CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _table(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return address, number of elements and dtype code of each tensor, or None if one of them is not supported."""
    table: list[int] = []
    for tensor in tensors:
        if not _is_supported(tensor):
            return None
        address, numel = tensor.data_ptr(), tensor.numel()
        if address == 0 and numel > 0:
            return None  # its storage was freed or never allocated
        table += (address, numel, _DTYPE_CODES[tensor.dtype])
    return table


def _copy_table(tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float) -> list[int] | None:
    """Return the table if the kernel supports this copy and is faster than torch; see the module's docstring."""
    min_numel = max(_MIN_NUMEL, _MIN_NUMEL_PER_TENSOR * len(tensors))
    if scale == 1.0 or flat.numel() < min_numel or not _is_supported(flat):
        return None
    return None if any(tensor.dtype is flat.dtype for tensor in tensors) else _table(tensors)


def _arguments(flat: torch.Tensor, scale: float) -> tuple[int, int, float, int, str]:
    return flat.data_ptr(), _DTYPE_CODES[flat.dtype], scale, torch.get_num_threads(), ""


def _split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    numels = [tensor.numel() for tensor in tensors]
    if flat.dim() != 1 or sum(numels) != flat.numel():
        raise AssertionError(f"a buffer of shape {tuple(flat.shape)} for tensors of {sum(numels)} elements")
    return list(flat.split(numels))


def _reference_sum(tensor: torch.Tensor) -> float:
    total = 0.0
    for block in tensor.reshape(-1).split(_BLOCK_NUMEL):
        block_fp64 = block.double()
        total += float(block_fp64.dot(block_fp64))
    return total


def _reference_copies(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], scale: float) -> None:
    if scale == 1.0:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for source, target in zip(sources, targets, strict=True):
        if source.dtype is target.dtype:
            torch.mul(source, scale, out=target)  # rounded once, as it is computed in fp32
        else:
            target.copy_((source.float() if source.itemsize < 4 else source) * scale)
