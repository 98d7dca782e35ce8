"""The bytes of a tensor as files hold them: little-endian elements in row-major order."""

from __future__ import annotations

from typing import cast

import torch

__all__ = ["bytes_of", "num_bytes", "plain"]


def num_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes the tensor's elements take."""
    return tensor.numel() * tensor.dtype.itemsize


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous on the CPU, without gradient; the same memory where it is so already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a plain tensor's memory; writing into it writes into the tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride, which view refuses
    return memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))
