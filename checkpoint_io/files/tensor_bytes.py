"""Bytes of a tensor as stored in files: little-endian elements in row-major order."""

from __future__ import annotations

from typing import cast

import torch

__all__ = ["bytes_of", "num_bytes", "to_contiguous_cpu"]


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the tensor's elements in bytes."""
    return tensor.numel() * tensor.dtype.itemsize


def to_contiguous_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor without gradient; shares memory if the tensor already is one."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; writes modify the tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.as_strided((tensor.numel(),), (1,))  # view() rejects odd strides of a single element
    return memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))
