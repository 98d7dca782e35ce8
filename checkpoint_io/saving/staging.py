"""Staging buffers: a few aligned host buffers for file writes, reused from save to save."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

__all__ = ["STAGING", "StagingBuffers", "host_memory"]

_HUGE_PAGE_BYTES = 2 * 2**20


class StagingBuffers:
    """Pool of aligned buffers for threads. Memory is allocated on first use and kept.

    All concurrent saves of the process share the pool, which bounds the memory.

    Args:
        count: Number of buffers.
        num_bytes: Size of each, a multiple of `PAGE_BYTES`.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self._idle = [_Buffer() for _ in range(count)]
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, *, is_pinned: bool = False) -> Iterator[torch.Tensor]:
        """Borrow a buffer, waiting until one is free. A thread must not hold two.

        Args:
            is_pinned: Whether an accelerator will write into it.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._idle))
            buffer = self._idle.pop()
        try:
            yield buffer.allocate(self.num_bytes, is_pinned)
        finally:
            with self._changed:
                self._idle.append(buffer)
                self._changed.notify()


class _Buffer:
    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False  # as requested: not every accelerator supports pinned memory

    def allocate(self, num_bytes: int, is_pinned: bool) -> torch.Tensor:
        if self._memory is None or (is_pinned and not self._is_pinned):
            self._memory = None  # free the old memory before allocating the new one
            self._memory = host_memory(num_bytes, is_pinned=True) if is_pinned else _huge_pages(num_bytes)
            self._is_pinned = is_pinned
        return self._memory


def host_memory(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Allocate host memory at a multiple of `PAGE_BYTES`.

    Args:
        num_bytes: Size, at least 1.
        is_pinned: If True, pin the memory where the accelerator supports it.
    """
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # page-aligned by the driver
        except RuntimeError:  # pinned memory is unsupported or exhausted: copies are slower, but correct
            return host_memory(num_bytes, is_pinned=False)
    # Shared mapping: private memory would be copied on the first write after a fork.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Allocate host memory in huge pages, so that one transfer to the disk takes few of them."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # unsupported by the system: small pages work too
            memory.madvise(mmap.MADV_HUGEPAGE)
    full = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -full.data_ptr() % _HUGE_PAGE_BYTES
    return full[offset : offset + num_bytes]


# Four threads keep the disk busy while some of them copy. On an idle machine a quarter of this memory would do; the
# rest hides delays when a thread waits for a core.
STAGING = StagingBuffers(count=4, num_bytes=8 * 2**20)
