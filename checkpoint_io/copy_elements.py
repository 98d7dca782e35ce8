"""Bytes of tensors in host memory: copies of a flat range of a tensor with any strides, device and dtype."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from booster.comm import fake

# A flat range is a range of the row-major flattening. Flattening a transposed or strided tensor would copy all of it.
# So the range is split into boxes, each of which is a view: part of the first row, full rows, part of the last row,
# and recursively in the dimensions below. A box is copied and converted directly into the output, without a temporary
# in torch. Device-to-host copies do use a temporary of the box's size, so these boxes are bounded.
# CPU boxes are copied in tiles of about equal length in every dimension, so that a transposed one reads full cache
# lines, and small enough to run without torch's intra-op threads. These spin while they wait, which takes many times
# as long as the copy if other processes or copy threads use the cores.
_MAX_DEVICE_ELEMENTS = 2**21
_MAX_TILE_ELEMENTS = 2**15


def copy_elements(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy elements `start` to `stop` of the tensor's row-major flattening.

    Args:
        tensor: Strided tensor on any device; lazily conjugated and negated ones are supported.
        start: First element.
        stop: One past the last element.
        out: Contiguous one-dimensional bytes on the CPU, of the elements' total size, aligned to the item size.
        dtype: Dtype to convert to.
    """
    if start == stop or (isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"):
        return  # a copy in host memory takes no further memory, and a fake tensor has no values
    tensor = tensor.detach()
    if needs_no_conversion(tensor, dtype):
        source = tensor.data_ptr() + start * dtype.itemsize
        ctypes.memmove(out.data_ptr(), source, (stop - start) * dtype.itemsize)  # releases the GIL
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)  # one box instead of several
    elements = out.view(dtype)
    max_elements = stop - start if tensor.device.type == "cpu" else _MAX_DEVICE_ELEMENTS
    done = 0
    for box in _boxes(tensor, start, stop, max_elements):
        target = elements[done : done + box.numel()].view(box.shape)
        done += box.numel()
        if box.device.type == "cpu":
            _copy_tiles(box, target)
        else:  # converted on the device: faster, and the transfer may be half as large
            target.copy_(box.to(dtype).contiguous())


def assign_elements(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy values into a tensor's row-major flattening, from element `start` on.

    The tensor may have any strides, device and dtype; values are converted.
    """
    count, done = values.numel(), 0
    for box in _boxes(tensor, start, start + count, count) if count else ():
        box.copy_(values[done : done + box.numel()].view(box.shape))
        done += box.numel()


def needs_no_conversion(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the tensor's memory equals its bytes in a file of this dtype, so that no conversion is needed."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; writes modify the tensor."""
    if tensor.numel() == 0 or isinstance(tensor, FakeTensor):  # which has no bytes to write or to sum up
        return memoryview(bytearray())
    flat = tensor.as_strided((tensor.numel(),), (1,))  # view() rejects odd strides of a single element
    return memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> bool:
    """Synchronize the accelerators of the tensors; return whether there are any.

    Copies in another thread run on another stream, which is not ordered after the training's kernels.
    """
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu")}
    for device in devices if fake.replicas is None else ():
        torch.accelerator.synchronize(device)
    return bool(devices)


def _boxes(tensor: torch.Tensor, start: int, stop: int, max_elements: int) -> Iterator[torch.Tensor]:
    """Yield views of at most `max_elements` elements that cover the flat range in order."""
    if tensor.dim() == 0:
        yield tensor
        return
    row = math.prod(tensor.shape[1:])
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # within one row
        yield from _boxes(tensor[last], start - last * row, stop - last * row, max_elements)
        return
    if start < first * row:
        yield from _boxes(tensor[first - 1], start - (first - 1) * row, row, max_elements)
    if row <= max_elements:
        yield from tensor[first:last].split(max_elements // row)
    else:
        for index in range(first, last):
            yield from _boxes(tensor[index], 0, row, max_elements)
    if last * row < stop:
        yield from _boxes(tensor[last], 0, stop - last * row, max_elements)


def _copy_tiles(box: torch.Tensor, target: torch.Tensor) -> None:
    if box.numel() <= _MAX_TILE_ELEMENTS:
        target.copy_(box)
        return
    dim = max(range(box.dim()), key=lambda dim: box.shape[dim])
    half = box.shape[dim] // 2
    for source, target_half in zip(box.tensor_split([half], dim), target.tensor_split([half], dim), strict=True):
        _copy_tiles(source, target_half)
