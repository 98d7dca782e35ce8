"""Host memory that bytes pass through on their way to a file: a few aligned buffers, kept from save to save."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

__all__ = ["STAGING", "StagingBuffers", "host_memory"]

_HUGE_PAGE_BYTES = 2 * 2**20


class StagingBuffers:
    """Aligned buffers that threads borrow; they get their memory when first used, and keep it.

    However many saves run at once, they share these: the memory is bounded per process.

    Args:
        count: How many there are.
        num_bytes: Size of each, a multiple of `PAGE_BYTES`.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self._idle = [_Buffer() for _ in range(count)]
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, *, is_pinned: bool = False) -> Iterator[torch.Tensor]:
        """Lends a buffer to the calling thread, which waits until there is one. A thread must not hold two.

        Args:
            is_pinned: Whether an accelerator is to write into it.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._idle))
            buffer = self._idle.pop()
        try:
            yield buffer.ready(self.num_bytes, is_pinned)
        finally:
            with self._changed:
                self._idle.append(buffer)
                self._changed.notify()


class _Buffer:
    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._is_pinned = False  # as asked for: not every accelerator has such memory

    def ready(self, num_bytes: int, is_pinned: bool) -> torch.Tensor:
        if self._memory is None or (is_pinned and not self._is_pinned):
            self._memory = None  # before the new memory, so that there is never both
            self._memory = host_memory(num_bytes, is_pinned=True) if is_pinned else _huge_pages(num_bytes)
            self._is_pinned = is_pinned
        return self._memory


def host_memory(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Returns new bytes on the CPU, at a multiple of `PAGE_BYTES`.

    Args:
        num_bytes: How many, at least one.
        is_pinned: Whether accelerators should reach them directly, where this one can.
    """
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # whole pages of the driver's
        except RuntimeError:  # an accelerator without such memory, or no more of it: copies are slower, and correct
            return host_memory(num_bytes, is_pinned=False)
    # Shared with processes that are forked off: private memory would be copied at the next write after a fork.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns new bytes in pages so large that one transfer to the disk takes few of them."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them: small ones do as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[offset : offset + num_bytes]


# Four threads keep the disk busy while some of them copy. On an idle machine a quarter of this memory would do; more
# of it hides that a thread has to wait for a core.
STAGING = StagingBuffers(count=4, num_bytes=8 * 2**20)
