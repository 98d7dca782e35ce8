"""One file with the states of some parameters, each chunk of it in two places: what is valid, and what is written."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from booster.errors import CheckpointError, ConfigError
from booster.kernels.disk_io import DiskQueue, Ticket, open_data_file
from booster.optim.memory_order import shaped_like
from booster.optim.offload.layout import PlaneLayout
from booster.optim.offload.mapping import PlaneMapping

__all__ = ["Planes", "StateFile"]

Planes = tuple[Tensor, Tensor]  # bytes of exp_avg and of exp_avg_sq

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Note [Slots]
# The file holds two *slots*, each with both planes. A chunk is valid in one of them; a step reads it there, writes the
# new states to the other, and then takes the other for the valid one. So a write that fails half way destroys nothing.
# If it fails, the new states stay in memory, as the parameters have been updated already.


class _Place(IntEnum):
    FIRST_SLOT = 0
    SECOND_SLOT = 1
    MEMORY = 2  # the new states could not be written


class StateFile:
    """A file with two moments of each parameter; see Note [Slots] and Note [Planes].

    Args:
        path: The file to make; it goes with its directory.
        parameters: Whose states these are; CPU tensors with at least one element that fill their memory without gaps.
        dtypes: For each of them the states' format.

    Raises:
        ConfigError: The disk has no room.
    """

    def __init__(self, path: Path, parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self.path = path
        self.parameters = list(parameters)
        self._dtypes = list(dtypes)
        sizes = [(one.numel(), dtype.itemsize) for one, dtype in zip(parameters, dtypes, strict=True)]
        self.layout = PlaneLayout(sizes)
        self._descriptor = _create(path, self._num_bytes)
        weakref.finalize(self, os.close, self._descriptor)
        self._mapping = PlaneMapping(self._descriptor, 2 * self.layout.num_bytes)
        self._places = [_Place.FIRST_SLOT] * len(self.layout.chunks)
        self._blank = set(range(len(self.layout.chunks)))  # never written, by nobody
        self._used: set[int] = set()
        self._moments = [self._moments_of(index) for index in range(len(self.parameters))]

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the states of a parameter, shaped like it; always the same tensors."""
        return self._moments[index]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The formats that there are."""
        return set(self._dtypes)

    def dtype(self, index: int) -> torch.dtype:
        """Returns the format of a parameter's states."""
        return self._dtypes[index]

    # For a step.

    def read(self, queue: DiskQueue, number: int, planes: Planes) -> list[Ticket]:
        """Starts to read the valid states of a chunk; they are there when all tickets were waited for."""
        if number in self._blank:
            for plane in planes:
                plane.zero_()
            return []
        place = self._places[number]
        if place is _Place.MEMORY:
            for plane, held in zip(planes, self._shown(number), strict=True):
                plane.copy_(held)
            return []
        return [
            queue.read(self._descriptor, plane, offset)
            for plane, offset in zip(planes, self._offsets(number, place), strict=True)
        ]

    def write(self, queue: DiskQueue, number: int, planes: Planes) -> list[Ticket]:
        """Starts to write a chunk's new states beside the valid ones; `commit` or `keep` follows."""
        offsets = self._offsets(number, self._next_place(number))
        return [queue.write(self._descriptor, plane, offset) for plane, offset in zip(planes, offsets, strict=True)]

    def commit(self, number: int) -> None:
        """Makes the chunk's new states, which have been written, the valid ones."""
        place = self._next_place(number)
        chunk = self.layout.chunks[number]
        for start, offset in zip(self._starts(number), self._offsets(number, place), strict=True):
            self._mapping.show_file(start, chunk.num_bytes, self._descriptor, offset)
        self._places[number] = place
        self._blank.discard(number)

    def keep(self, number: int, planes: Planes) -> None:
        """Makes the chunk's new states, which could not be written, the valid ones: a copy in memory."""
        for start, plane in zip(self._starts(number), planes, strict=True):
            self._mapping.show_memory(start, plane.numel())
        self._places[number] = _Place.MEMORY
        self._blank.discard(number)
        for plane, held in zip(planes, self._shown(number), strict=True):
            held.copy_(plane)

    # For what goes through the mapping.

    def begin(self, index: int) -> None:
        """Makes the states of a parameter zero."""
        if index in self._used:
            self.touch(index)
            for moment in self._moments[index]:
                moment.zero_()
        self._used.add(index)

    def touch(self, index: int) -> None:
        """Says that a parameter's states are about to be written through the tensors of `moments`.

        Raises:
            CheckpointError: The file is not whole, and touching the tensors would end the process.
        """
        self.check()
        self._used.add(index)
        num_bytes = self.parameters[index].numel() * self._dtypes[index].itemsize
        self._blank.difference_update(self.layout.chunks_of(index, num_bytes))

    def remove(self) -> None:
        """Deletes the file; its room is free once nobody holds its tensors any more."""
        self.path.unlink(missing_ok=True)

    def forget_blanks(self) -> None:
        """Has every chunk be read from now on, as somebody may have written to what was zero."""
        self._blank.clear()

    @property
    def is_whole(self) -> bool:
        """Whether the file has all of its bytes."""
        try:
            return os.fstat(self._descriptor).st_size >= self._num_bytes
        except OSError:  # its disk is gone
            return False

    def check(self) -> None:
        """Returns if the states can be read.

        Raises:
            CheckpointError: The file was cut, so that some states are lost.
        """
        if not self.is_whole:
            raise CheckpointError(
                f"{self.path} holds optimizer states and is shorter than the {self._num_bytes} bytes that were written"
                " to it, so some states are lost: load them from a checkpoint"
            )

    @property
    def _num_bytes(self) -> int:
        return 4 * self.layout.num_bytes

    def _next_place(self, number: int) -> _Place:
        is_first = self._places[number] is _Place.FIRST_SLOT
        return _Place.SECOND_SLOT if is_first else _Place.FIRST_SLOT

    def _starts(self, number: int) -> tuple[int, int]:
        """Returns where the chunk of each plane begins in the mapping."""
        start = self.layout.chunks[number].start
        return start, self.layout.num_bytes + start

    def _offsets(self, number: int, place: _Place) -> tuple[int, int]:
        """Returns where the chunk of each plane begins in the file."""
        first, second = self._starts(number)
        slot = place * 2 * self.layout.num_bytes
        return slot + first, slot + second

    def _shown(self, number: int) -> list[Tensor]:
        num_bytes = self.layout.chunks[number].num_bytes
        return [self._mapping.tensor(start, num_bytes, torch.uint8) for start in self._starts(number)]

    def _moments_of(self, index: int) -> tuple[Tensor, Tensor]:
        parameter, dtype, start = self.parameters[index], self._dtypes[index], self.layout.starts[index]
        first = self._mapping.tensor(start, parameter.numel(), dtype)
        second = self._mapping.tensor(self.layout.num_bytes + start, parameter.numel(), dtype)
        return shaped_like(first, parameter), shaped_like(second, parameter)


def _create(path: Path, num_bytes: int) -> int:
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise ConfigError(_no_room(path, num_bytes, free))
    try:
        descriptor, _ = open_data_file(path, num_bytes)
    except OSError as error:
        if error.errno in _FULL:
            raise ConfigError(_no_room(path, num_bytes, shutil.disk_usage(path.parent).free)) from error
        raise
    return descriptor


def _no_room(path: Path, num_bytes: int, free: int) -> str:
    return (
        f"the optimizer states that go to {path.parent} need {num_bytes} bytes (two copies of 8 bytes a parameter), and"
        f" {free} bytes are free there or allowed to you: free some space, give an nvme_offload_dir on a larger disk,"
        " or a smaller nvme_offload_fraction"
    )
