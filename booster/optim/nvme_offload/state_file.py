"""File of optimizer states with double-buffered chunks: one copy is valid while the other is written."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from booster.errors import CheckpointError, ConfigError
from booster.kernels.disk_io import DiskQueue, IOTicket, open_data_file
from booster.optim.adam_update import view_like

# Note [State file layout]
# exp_avg and exp_avg_sq of all parameters of a file form one *plane* each, parameter after parameter, so that a
# parameter's exp_avg is contiguous. Both planes have the same layout and are split into *chunks* of `CHUNK_BYTES`; the
# range of a parameter in a chunk is a `StateRange`. A step reads, updates and writes one chunk of both planes in turn.
# Ranges start at multiples of `_RANGE_ALIGNMENT`, so that an element's lane in a vector register does not depend on
# where its parameter is split.
# The file holds two *slots*, each with both planes. A chunk is valid in one slot; a step reads it there, writes the new
# states to the other slot, and then makes that one the valid one. So a write that fails half way destroys nothing.
# After such a failure the new states stay in memory, as the parameters have been updated already.
CHUNK_BYTES = 8 * 2**20
_RANGE_ALIGNMENT = 256
_PAGE_BYTES = 4096  # granularity of direct I/O and of mappings


@dataclass(frozen=True, slots=True)
class StateRange:
    """Range of a parameter's states within a chunk.

    Attributes:
        index: Index of the parameter in the file.
        start: First element of the parameter.
        stop: One past the last element.
        offset: Start of the range in the chunk, in bytes.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Byte range of a plane: `num_bytes` from `start`, both multiples of the page size."""

    start: int
    num_bytes: int
    ranges: tuple[StateRange, ...]


class BlockLayout:
    """Layout of parameters in a plane; see Note [State file layout].

    Args:
        sizes: Number of elements (at least one) and bytes per element of each parameter.

    Attributes:
        starts: Start of each parameter in the plane, in bytes.
        num_bytes: Size of a plane, a multiple of the page size.
        chunks: Chunks of the plane.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.starts: list[int] = []
        end = 0
        for numel, itemsize in sizes:
            self.starts.append(end)
            end = _round_up(end + numel * itemsize, _RANGE_ALIGNMENT)
        self.num_bytes = _round_up(end, _PAGE_BYTES)
        self.chunks = self._split(sizes)

    def _split(self, sizes: Sequence[tuple[int, int]]) -> list[StateChunk]:
        ranges: list[list[StateRange]] = [[] for _ in range(0, self.num_bytes, CHUNK_BYTES)]
        for index, ((numel, itemsize), start) in enumerate(zip(sizes, self.starts, strict=True)):
            stop = start + numel * itemsize
            for chunk in range(start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES + 1):
                base = chunk * CHUNK_BYTES
                first, last = max(start, base), min(stop, base + CHUNK_BYTES)
                elements = (first - start) // itemsize, (last - start) // itemsize
                ranges[chunk].append(StateRange(index, *elements, first - base))
        starts = range(0, self.num_bytes, CHUNK_BYTES)
        return [
            StateChunk(start, min(CHUNK_BYTES, self.num_bytes - start), tuple(chunk_ranges))
            for start, chunk_ranges in zip(starts, ranges, strict=True)
        ]


def _round_up(index: int, multiple: int) -> int:
    return -(-index // multiple) * multiple


# Note [State mapping]
# `optimizer.state` holds tensors over a mapping of the file: reads of them (state_dict, a checkpoint) fault pages in
# from the disk, and use page cache, which the kernel can reclaim. A step writes a chunk's new states to its other slot.
# The chunk's addresses are then remapped to that slot (MAP_FIXED), or to anonymous memory if the write failed. So
# tensors stay valid, and a parameter that spans several chunks stays contiguous. Direct I/O and access through the
# mapping may be mixed: the kernel writes dirty pages back before a direct read, and drops cached pages at a direct
# write.
_MAP_FIXED = 0x10  # the same on every system, but missing in Python's mmap module
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
# Address, length, protection, flags, descriptor, offset.
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)


class _BlockMapping:
    """Address range mapped to the start of a file, whose pages can be remapped.

    It is unmapped when the object and all its tensors are freed. All sizes are multiples of the page size.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements from byte `start`, with a separate storage, so that saving it saves nothing else."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def remap(self, start: int, num_bytes: int, descriptor: int | None = None, offset: int = 0) -> None:
        """Map the bytes from `start` to an offset of a file, or without one to zeroed anonymous memory."""
        address = self._address + start
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor is None else mmap.MAP_SHARED
        descriptor = -1 if descriptor is None else descriptor
        if _mmap(address, num_bytes, _READ_WRITE, flags | _MAP_FIXED, descriptor, offset) != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {num_bytes} bytes: {os.strerror(code)}")


StateBlocks = tuple[Tensor, Tensor]  # bytes of exp_avg and of exp_avg_sq

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _ChunkLocation(IntEnum):
    FIRST_COPY = 0
    SECOND_COPY = 1
    MEMORY = 2  # the new states could not be written


class StateFile:
    """File with two moments of each parameter; see Note [State file layout].

    Args:
        path: Path of the file to create; it is removed with its directory.
        parameters: Parameters of the states: dense CPU tensors with at least one element.
        dtypes: dtype of each parameter's states.

    Attributes:
        layout: Layout of a plane.
        moments: States of each parameter, shaped like it; always the same tensors.

    Raises:
        ConfigError: The disk has too little free space.
    """

    def __init__(self, path: Path, parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self.path = path
        self.parameters = list(parameters)
        self.dtypes = list(dtypes)
        sizes = [(one.numel(), dtype.itemsize) for one, dtype in zip(parameters, dtypes, strict=True)]
        self.layout = BlockLayout(sizes)
        self._num_bytes = 4 * self.layout.num_bytes
        self._descriptor = _create(path, self._num_bytes)
        weakref.finalize(self, os.close, self._descriptor)
        self._mapping = _BlockMapping(self._descriptor, 2 * self.layout.num_bytes)
        self._locations = [_ChunkLocation.FIRST_COPY] * len(self.layout.chunks)
        self._used: set[int] = set()  # parameters whose states may not be zero
        self.moments: list[tuple[Tensor, Tensor]] = []
        for one, dtype, start in zip(self.parameters, self.dtypes, self.layout.starts, strict=True):
            first = self._mapping.tensor(start, one.numel(), dtype)
            second = self._mapping.tensor(self.layout.num_bytes + start, one.numel(), dtype)
            self.moments.append((view_like(first, one), view_like(second, one)))

    def read(self, queue: DiskQueue, index: int, blocks: StateBlocks) -> list[IOTicket]:
        """Start reading the valid states of a chunk; they are complete after all tickets were waited for."""
        location = self._locations[index]
        if location is _ChunkLocation.MEMORY:
            for block, mapped in zip(blocks, self._mapped(index), strict=True):
                block.copy_(mapped)
            return []
        return [
            queue.read(self._descriptor, block, offset)
            for block, offset in zip(blocks, self._offsets(index, location), strict=True)
        ]

    def write(self, queue: DiskQueue, index: int, blocks: StateBlocks) -> list[IOTicket]:
        """Start writing a chunk's new states to its other slot; call `commit` or `keep_in_memory` afterwards."""
        offsets = self._offsets(index, self._write_location(index))
        return [queue.write(self._descriptor, block, offset) for block, offset in zip(blocks, offsets, strict=True)]

    def commit(self, index: int) -> None:
        """Make the chunk's new states, which have been written, the valid ones."""
        location = self._write_location(index)
        chunk = self.layout.chunks[index]
        for start, offset in zip(self._starts(index), self._offsets(index, location), strict=True):
            self._mapping.remap(start, chunk.num_bytes, self._descriptor, offset)
        self._locations[index] = location

    def keep_in_memory(self, index: int, blocks: StateBlocks) -> None:
        """Make a copy in memory of the chunk's new states, which could not be written, the valid one."""
        for start, block in zip(self._starts(index), blocks, strict=True):
            self._mapping.remap(start, block.numel())
        self._locations[index] = _ChunkLocation.MEMORY
        for block, mapped in zip(blocks, self._mapped(index), strict=True):
            mapped.copy_(block)

    def zero(self, index: int) -> None:
        """Set the states of a parameter to zero."""
        if index in self._used:
            self.mark_modified(index)
            for moment in self.moments[index]:
                moment.zero_()
        self._used.add(index)

    def mark_modified(self, index: int) -> None:
        """Mark a parameter's states as modified; call it before a write to the tensors of `moments`.

        Raises:
            CheckpointError: The file is truncated, and access to the tensors would raise SIGBUS.
        """
        self.check()
        self._used.add(index)

    def remove(self) -> None:
        """Delete the file; its disk space is released when all of its tensors are freed."""
        self.path.unlink(missing_ok=True)

    @property
    def is_complete(self) -> bool:
        """Whether the file has its full size."""
        try:
            return os.fstat(self._descriptor).st_size >= self._num_bytes
        except OSError:  # its disk is gone
            return False

    def check(self) -> None:
        """Check that the states can be read.

        Raises:
            CheckpointError: The file is truncated, so some states are lost.
        """
        if not self.is_complete:
            raise CheckpointError(
                f"{self.path} holds optimizer states and is shorter than the {self._num_bytes} bytes written to it, so"
                " some states are lost: load them from a checkpoint"
            )

    def _write_location(self, index: int) -> _ChunkLocation:
        is_first = self._locations[index] is _ChunkLocation.FIRST_COPY
        return _ChunkLocation.SECOND_COPY if is_first else _ChunkLocation.FIRST_COPY

    def _starts(self, index: int) -> tuple[int, int]:
        """Return the start of the chunk in the mapping, for each plane."""
        start = self.layout.chunks[index].start
        return start, self.layout.num_bytes + start

    def _offsets(self, index: int, location: _ChunkLocation) -> tuple[int, int]:
        """Return the start of the chunk in the file, for each plane."""
        first, second = self._starts(index)
        copy_start = location * 2 * self.layout.num_bytes
        return copy_start + first, copy_start + second

    def _mapped(self, index: int) -> list[Tensor]:
        num_bytes = self.layout.chunks[index].num_bytes
        return [self._mapping.tensor(start, num_bytes, torch.uint8) for start in self._starts(index)]


def _create(path: Path, num_bytes: int) -> int:
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise ConfigError(_disk_full_message(path, num_bytes, free))
    try:
        descriptor, _ = open_data_file(path, num_bytes)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise ConfigError(_disk_full_message(path, num_bytes, shutil.disk_usage(path.parent).free)) from error
        raise
    return descriptor


def _disk_full_message(path: Path, num_bytes: int, free: int) -> str:
    return (
        f"the optimizer states in {path.parent} need {num_bytes} bytes (two copies of 8 bytes per parameter), and"
        f" {free} bytes are free there or left in the quota: free some space, give an nvme_offload_dir on a larger"
        " disk, or a smaller nvme_offload_fraction"
    )
