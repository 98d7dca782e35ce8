"""Norms, packing and unpacking of many tensors in one pass over their memory.

Note [What is compiled]: only what was seen to be 1.3 times as fast as torch. Sums of squares are, and find inf and nan
in the same pass. Copies are where they multiply, convert and leave the caches, because torch takes two passes; what it
does in one runs at the speed of the memory there too, and tiny tensors are copied before their addresses are collected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from .build import load_kernel

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum DType` in csrc/simd.h
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # others, as DTensor, may not be what lies at their address
_BLOCK_NUMEL = 2**16  # of the reference's sums; as fp64 it stays in the cache
_FEWEST_NUMEL, _FEWEST_PER_TENSOR = 2**22, 2**15  # elements that are worth a compiled copy, in all and on average


def takes_sum_of_squares(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether `sum_of_squares` is fast: all are dense fp32, bf16 or fp16 on the CPU, with a kernel."""
    return all(map(_is_plain, tensors)) and load_kernel("flat_buffers") is not None


@torch.no_grad()
def sum_of_squares(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements; up to fp32 it is finite exactly if all of them are.

    It is summed in fp64, so no square leaves the range. The compiled sum has the same bits for any number of threads
    and on any CPU; it adds squares of elements of 16 bits in groups of four in fp32, a relative error below 2**-22.

    Args:
        tensors: Of any floating dtype; see `takes_sum_of_squares` for those that are fast.
    """
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
        tensors: On the buffer's device.
        flat: As many elements as the tensors have together, of any floating dtype.
        scale: The factor.
    """
    parts = _parts(flat, tensors)
    table = _copy_table(tensors, flat, scale)
    native = None if table is None else load_kernel("flat_buffers")
    if native is None:
        _reference_copies(tensors, [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)], scale)
    else:
        native.pack(table, *_arguments(flat, scale))
        increment_version(flat)  # the kernel writes behind autograd's back


@torch.no_grad()
def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Write `scale` times the parts of a flat buffer into tensors; the inverse of `pack`.

    Args:
        flat: As many elements as the tensors have together, of any floating dtype.
        tensors: On the buffer's device.
        scale: The factor.
    """
    parts = _parts(flat, tensors)
    table = _copy_table(tensors, flat, scale)
    native = None if table is None else load_kernel("flat_buffers")
    if native is None:
        _reference_copies([part.view(one.shape) for part, one in zip(parts, tensors, strict=True)], tensors, scale)
    else:
        native.unpack(table, *_arguments(flat, scale))
        increment_version(tensors)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements lie one after the other at its address, as they are."""
    return (
        type(tensor) in _TENSOR_TYPES
        and tensor.is_cpu
        and tensor.dtype in _DTYPE_CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _table(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return address, number of elements and dtype of each tensor; None if the kernel can't take one of them."""
    table: list[int] = []
    for tensor in tensors:
        if not _is_plain(tensor):
            return None
        address, numel = tensor.data_ptr(), tensor.numel()
        if address == 0 and numel > 0:
            return None  # its memory was given back, or it never had any
        table += (address, numel, _DTYPE_CODES[tensor.dtype])
    return table


def _copy_table(tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float) -> list[int] | None:
    """Return the table if the kernel can copy these and is faster; see Note [What is compiled]."""
    fewest = max(_FEWEST_NUMEL, _FEWEST_PER_TENSOR * len(tensors))
    if scale == 1.0 or flat.numel() < fewest or not _is_plain(flat):
        return None
    return None if any(tensor.dtype is flat.dtype for tensor in tensors) else _table(tensors)


def _arguments(flat: torch.Tensor, scale: float) -> tuple[int, int, float, int, str]:
    return flat.data_ptr(), _DTYPE_CODES[flat.dtype], scale, torch.get_num_threads(), ""


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    numels = [tensor.numel() for tensor in tensors]
    if flat.dim() != 1 or sum(numels) != flat.numel():
        raise AssertionError(f"a buffer of shape {tuple(flat.shape)} for tensors of {sum(numels)} elements")
    return list(flat.split(numels))


def _reference_sum(tensor: torch.Tensor) -> float:
    total = 0.0
    for block in tensor.reshape(-1).split(_BLOCK_NUMEL):
        wide = block.double()
        total += float(wide.dot(wide))
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
