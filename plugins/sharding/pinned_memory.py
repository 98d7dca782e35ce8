"""Pinned host memory for what is offloaded from an accelerator, and free lists."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from booster.comm import offloaded_memory

# torch rounds each allocation of pinned memory up to a power of two, and keeps it when it is freed. So it is allocated
# in slabs that are powers of two already, in which blocks lie one behind another. A slab is as large as all others
# together, up to MAX_SLAB_BYTES: little is unused beside small models, and at most one slab beside large ones, whose
# chunks of up to 256 MiB leave little of it. A block that is larger has a slab of its own, whose rest is for others.
MAX_SLAB_BYTES = 2**30
_ALIGNMENT = 4096


class FreeList:
    """Free list of extents.

    Attributes:
        freed: Freed extents (offset, bytes) that are not merged yet. Appending needs no lock, which the thread that
            runs a garbage collection may already hold.
    """

    def __init__(self) -> None:
        self.freed: deque[tuple[int, int]] = deque()
        self._extents: list[tuple[int, int]] = []  # by offset; no two touch

    def allocate(self, num_bytes: int) -> int | None:
        """Allocate from the first extent that is large enough (first fit); return its offset, or None."""
        self._merge_freed()
        for index, (offset, length) in enumerate(self._extents):
            if length >= num_bytes > 0:
                rest = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                self._extents[index : index + 1] = rest
                return offset
        return None

    def _merge_freed(self) -> None:
        if not self.freed:
            return
        added = [self.freed.popleft() for _ in range(len(self.freed))]
        joined: list[tuple[int, int]] = []
        for offset, length in sorted(one for one in self._extents + added if one[1] > 0):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._extents = joined


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    free_list: FreeList = field(default_factory=FreeList)

    def __post_init__(self) -> None:
        self.free_list.freed.append((0, self.memory.numel()))


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBlock:
    """Pinned bytes in a slab."""

    memory: torch.Tensor
    _slab: _Slab
    _extent: tuple[int, int]

    def free(self) -> None:
        """Return the bytes, to and from which no copy may be in flight, to their owner. Must not be called twice."""
        self._slab.free_list.freed.append(self._extent)


class PinnedMemory:
    """Pinned memory of one owner, in slabs that are kept until it is dropped with all blocks."""

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def allocate(self, num_bytes: int) -> PinnedBlock:
        """Return a block of uninitialized bytes at a multiple of 4096 of its slab."""
        size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        for slab in self._slabs:
            offset = slab.free_list.allocate(size)
            if offset is not None:
                break
        else:
            slab = self._new_slab(size)
            offset = slab.free_list.allocate(size)
            assert offset is not None
        return PinnedBlock(slab.memory[offset : offset + num_bytes], slab, (offset, size))

    def _new_slab(self, num_bytes: int) -> _Slab:
        wanted = max(num_bytes, min(MAX_SLAB_BYTES, self.num_bytes))
        with offloaded_memory():
            memory = torch.empty(1 << (wanted - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        self._slabs.append(_Slab(memory))
        return self._slabs[-1]
