"""Buffers for gathered weights and for gradients, reused as soon as no tensor views them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm import broadcast

from .compiling import not_compiled

# Weights are gathered into buffers that are taken back when the weights are not needed any more, and memory that is
# touched for the first time is many times slower than memory that is used again. But somebody may still hold a view of
# them: activation checkpointing keeps the weights that a recomputed forward saved, a module may return its weight, a
# user may keep `module.weight.detach()`. So a buffer is used again only when its storage has no reference left but the
# pool's own; until then it is *lent*: it is not written, it counts as held, and it comes back when the last view is
# gone. No flag has to be right for that, so no gradient is ever computed from the wrong weights.

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of the pool.

    Attributes:
        memory: The bytes.
        own_references: Number of references to its storage without views.
    """

    memory: torch.Tensor
    own_references: int

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        return self.memory.numel()

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return its first elements as a flat tensor."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    @property
    def num_views(self) -> int:
        """How many tensors look at it."""
        return _references(self.memory) - self.own_references


class BufferPool:
    """Buffers of one device.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Buffer] = []
        self._lent: list[Buffer] = []
        self._num_bytes_out = 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of buffers that were taken and not given back, or that somebody still looks at."""
        self._collect()
        return self._num_bytes_out + sum(buffer.num_bytes for buffer in self._lent)

    @property
    def bytes_held(self) -> int:
        """Bytes of all buffers."""
        return self.bytes_in_use + sum(buffer.num_bytes for buffer in self._free)

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least so many bytes, with any content."""
        self._collect()
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=lambda one: one.num_bytes)
            self._free.remove(buffer)
        else:
            self._free.clear()  # too small: kept beside a larger one they would only be held
            with torch.inference_mode(False):  # else nothing else could write to it
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            buffer = Buffer(memory, _references(memory))
        self._num_bytes_out += buffer.num_bytes
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back of which the caller has dropped all views."""
        self._num_bytes_out -= buffer.num_bytes
        self._lent.append(buffer)
        self._collect()

    def trim(self) -> None:
        """Free unused buffers."""
        self._collect()
        self._free.clear()

    def _collect(self) -> None:
        if not self._lent:
            return
        if _use_count is None:
            self._lent.clear()  # who can't count must not use them again; the last view frees them
            return
        self._free += [buffer for buffer in self._lent if buffer.num_views == 0]
        self._lent = [buffer for buffer in self._lent if buffer.num_views > 0]


def _references(memory: torch.Tensor) -> int:
    if _use_count is None:
        return 0
    storage = memory.untyped_storage()
    # Who keeps the storage itself has the very object that is asked for here, which counts once for all its holders.
    return _use_count(storage._cdata) + sys.getrefcount(storage)


@not_compiled
@torch.no_grad()
def broadcast_joined(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks the first rank's tensors, with one message per dtype. Collective."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype == dtype]
        joined = torch.cat([tensor.reshape(-1) for tensor in members])
        broadcast([joined], group)
        for tensor, part in zip(members, joined.split([tensor.numel() for tensor in members]), strict=True):
            # Through `.data`: a graph that saved the buffer must not take it for changed. Where a forward changes it,
            # that forward has marked it as changed itself.
            tensor.data.copy_(part.view(tensor.shape))
