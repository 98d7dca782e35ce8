"""Pool of buffers for gathered weights and gradients; a buffer is reused when no tensor views it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

# Weights are gathered into buffers and released after use. The first write to new memory is many times slower than
# writing to reused memory, so buffers are reused. But views of a released buffer may exist: activation checkpointing
# keeps the weights that a recomputed forward saved, a module may return its weight, and a user may keep
# `module.weight.detach()`. A buffer is therefore reused only when the pool holds the last reference to its storage.
# Until then it is *viewed*: it is not written, counts as held, and becomes free with the last view. This depends on
# reference counts only, so no gradient is ever computed from overwritten weights.

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(slots=True, eq=False)
class Buffer:
    """Buffer of the pool.

    Attributes:
        memory: Bytes of the buffer.
        own_references: Number of references to its storage if no view exists.
    """

    memory: torch.Tensor
    own_references: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.memory.numel()

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat view of its first elements."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    @property
    def num_views(self) -> int:
        """Number of tensors that view it."""
        return _references(self.memory) - self.own_references


class BufferPool:
    """Pool of buffers on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Buffer] = []
        self._viewed: list[Buffer] = []
        self._acquired_bytes = 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of buffers that are taken, or released but still viewed."""
        self._collect()
        return self._acquired_bytes + sum(buffer.num_bytes for buffer in self._viewed)

    @property
    def bytes_held(self) -> int:
        """Bytes of all buffers."""
        return self.bytes_in_use + sum(buffer.num_bytes for buffer in self._free)

    def acquire(self, num_bytes: int) -> Buffer:
        """Return an uninitialized buffer of at least `num_bytes` bytes."""
        self._collect()
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=lambda one: one.num_bytes)
            self._free.remove(buffer)
        else:
            self._free.clear()  # too small, and useless next to a larger buffer
            # Code outside inference mode must be able to write to it. Leaving it leaves modes such as fake ones, too.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            buffer = Buffer(memory, _references(memory))
        self._acquired_bytes += buffer.num_bytes
        return buffer

    def release(self, *buffers: Buffer | None) -> None:
        """Release buffers, of which the caller has dropped its own views, and ignore None."""
        for buffer in buffers:
            if buffer is not None:
                self._acquired_bytes -= buffer.num_bytes
                self._viewed.append(buffer)
        self._collect()

    def trim(self) -> None:
        """Free unused buffers."""
        self._collect()
        self._free.clear()

    def _collect(self) -> None:
        if not self._viewed:
            return
        if _use_count is None:
            self._viewed.clear()  # without reference counts they can't be reused; the last view frees them
            return
        self._free += [buffer for buffer in self._viewed if buffer.num_views == 0]
        self._viewed = [buffer for buffer in self._viewed if buffer.num_views > 0]


def _references(memory: torch.Tensor) -> int:
    if _use_count is None:
        return 0
    storage = memory.untyped_storage()
    # All holders of the storage object share the Python object used here, so it counts as one reference of the tensor.
    return _use_count(storage._cdata) + sys.getrefcount(storage)
