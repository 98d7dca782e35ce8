"""Copies a stretch of a tensor's elements into host memory, whatever its strides, device and number format."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator

import torch

__all__ = ["copy_elements", "is_plain", "wait_for_devices"]

# Note [Stretches]
# A stretch is a range of the row-major flattening. Flattening a transposed or strided tensor would copy all of it; so
# the stretch is cut into boxes, each of which is a view: some of the first row, whole rows, some of the last row, and
# so on in the dimensions below. A box is copied straight to its place, which converts its elements on the way, and
# torch makes no temporary. Between a device and the host it makes one of a box's size: there, boxes are bounded.
# On the CPU a box is copied in tiles that are about as long in every dimension, so that a transposed one reads whole
# cache lines, and so small that torch doesn't call its own threads: they spin while they wait for each other, and where
# other processes want the cores too, or several threads copy at once, that takes many times as long as the copy.
_MAX_DEVICE_ELEMENTS = 2**21
_MAX_TILE_ELEMENTS = 2**15


def copy_elements(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy elements `start` to `stop` of the tensor's row-major flattening.

    Args:
        tensor: Any strided tensor, on any device; lazily conjugated and negated ones too.
        start: First element.
        stop: One past the last.
        out: Bytes on the CPU, one-dimensional and contiguous: as many as the elements take, at a multiple of their
            size from the beginning of its memory.
        dtype: The number format to convert to.
    """
    if start == stop:
        return
    tensor = tensor.detach()
    if is_plain(tensor, dtype):
        source = tensor.data_ptr() + start * dtype.itemsize
        ctypes.memmove(out.data_ptr(), source, (stop - start) * dtype.itemsize)  # lets other threads run meanwhile
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)  # one box instead of several
    elements = out.view(dtype)
    limit = stop - start if tensor.device.type == "cpu" else _MAX_DEVICE_ELEMENTS
    done = 0
    for box in _boxes(tensor, start, stop, limit):
        target = elements[done : done + box.numel()].view(box.shape)
        done += box.numel()
        if box.device.type == "cpu":
            _copy_tiles(box, target)
        else:  # converted before the transfer: it is faster there, and what travels may be half as much
            target.copy_(box.to(dtype).contiguous())


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the tensor's memory holds just the bytes that a file of this number format should hold."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> bool:
    """Wait until what was asked of the tensors' accelerators is done; return whether there is any.

    Copies in another thread run on another stream, where nothing else would keep them behind the training's kernels.
    """
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu")}
    for device in devices:
        torch.accelerator.synchronize(device)
    return bool(devices)


def _boxes(tensor: torch.Tensor, start: int, stop: int, limit: int) -> Iterator[torch.Tensor]:
    """Yield views of at most `limit` elements that hold the stretch, in its order; see Note [Stretches]."""
    if tensor.dim() == 0:
        yield tensor
        return
    row = math.prod(tensor.shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
        yield from _boxes(tensor[last], start - last * row, stop - last * row, limit)
        return
    if start < first * row:
        yield from _boxes(tensor[first - 1], start - (first - 1) * row, row, limit)
    if row <= limit:
        yield from tensor[first:last].split(limit // row)
    else:
        for index in range(first, last):
            yield from _boxes(tensor[index], 0, row, limit)
    if last * row < stop:
        yield from _boxes(tensor[last], 0, stop - last * row, limit)


def _copy_tiles(box: torch.Tensor, target: torch.Tensor) -> None:
    if box.numel() <= _MAX_TILE_ELEMENTS:
        target.copy_(box)
        return
    dim = max(range(box.dim()), key=lambda dim: box.shape[dim])
    half = box.shape[dim] // 2
    for source, part in zip(box.tensor_split([half], dim), target.tensor_split([half], dim), strict=True):
        _copy_tiles(source, part)
