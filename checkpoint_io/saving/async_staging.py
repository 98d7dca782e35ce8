"""Copies what a rank writes into host memory that is kept from save to save, so that the training may go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from booster.checkpoint_io.copy_elements import copy_elements, wait_for_devices
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.planning.plan import BLOCK_BYTES, WriteRange
from booster.checkpoint_io.saving.staging import host_memory
from booster.checkpoint_io.worker_threads import run_in_threads
from booster.interface import TensorSlice

__all__ = ["Arena", "stage_slices"]

# Note [Copying threads]
# The training waits for the copy, so it is spread over a few threads: plain ones and not torch's own, see
# Note [Stretches].
_NUM_THREADS = 4
_ALIGNMENT = 64  # of each copy, for vector instructions

Span = tuple[int, int]


class Arena:
    """Host memory for the copies of one save, kept for the next one: fresh memory costs more than the copy itself.

    It grows to what a save needs. What one save leaves unused is given back when the next one begins.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, num_bytes: int, *, is_pinned: bool = False) -> torch.Tensor:
        """Returns bytes that are the caller's until `reset`, at a multiple of `PAGE_BYTES`.

        Args:
            num_bytes: How many.
            is_pinned: Whether accelerators should reach them directly.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        fitting = [block for block in self._blocks if block.is_pinned == is_pinned and block.room >= num_bytes]
        if not fitting:
            self._blocks = [block for block in self._blocks if block.used > 0]  # before the new one is made
            fitting = [_Block(num_bytes, is_pinned)]
            self._blocks += fitting
        return min(fitting, key=lambda block: block.room).take(num_bytes)

    def reset(self) -> None:
        """Takes all memory back: no copy of the save before may be in use. What that save did not use is freed."""
        self._blocks = [block for block in self._blocks if block.used > 0]
        for block in self._blocks:
            block.used = 0

    @property
    def num_bytes(self) -> int:
        """How much memory the arena has."""
        return sum(block.memory.numel() for block in self._blocks)


class _Block:
    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.memory = host_memory(num_bytes, is_pinned=is_pinned)
        self.is_pinned = is_pinned
        self.used = 0

    @property
    def room(self) -> int:
        return self.memory.numel() - self.used

    def take(self, num_bytes: int) -> torch.Tensor:
        taken = self.memory[self.used : self.used + num_bytes]
        self.used = min(self.used + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, self.memory.numel())
        return taken


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements of a slice, and where in the arena's memory they go."""

    held: TensorSlice
    span: Span
    offset: int

    @property
    def num_bytes(self) -> int:
        return (self.span[1] - self.span[0]) * self.held.dtype.itemsize

    def target(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.num_bytes]


class _StagedSlices(Sequence[TensorSlice]):
    """Slices over the arena's memory. Each is made when it is asked for: later, while the training goes on.

    It keeps nothing of the tensors that were copied: the training may free them.

    Args:
        slices: What was copied.
        spans: For each of them the first element that was, and one past the last.
        offsets: For each of them where in the memory its copy begins.
        memory: The copies.
    """

    def __init__(
        self, slices: Sequence[TensorSlice], spans: Sequence[Span], offsets: Sequence[int], memory: torch.Tensor
    ) -> None:
        self._facts = [
            (held.name, held.dtype, held.global_shape, held.box, held.primary, held.shared) for held in slices
        ]
        self._spans = spans
        self._offsets = offsets
        self._memory = memory

    def __len__(self) -> int:
        return len(self._facts)

    @overload
    def __getitem__(self, index: int) -> TensorSlice: ...

    @overload
    def __getitem__(self, index: slice) -> list[TensorSlice]: ...

    def __getitem__(self, index: int | slice) -> TensorSlice | list[TensorSlice]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        name, dtype, global_shape, box, primary, shared = self._facts[index]
        span, offset = self._spans[index], self._offsets[index]
        copied = self._memory[offset : offset + (span[1] - span[0]) * dtype.itemsize]
        return TensorSlice(
            name=name,
            dtype=dtype,
            global_shape=global_shape,
            box=box,
            span=span,
            tensor=copied.view(dtype),
            primary=primary,
            shared=shared,
        )


def stage_slices(ranges: Sequence[WriteRange], slices: Sequence[TensorSlice], arena: Arena) -> Sequence[TensorSlice]:
    """Returns copies of the slices that hold what the ranges write, for `write_ranges` with the same ranges.

    When it returns, the caller may change its tensors. Memory: the bytes of the ranges, in the format of the file.
    Collective: no.

    Args:
        ranges: What this rank's memory is written from.
        slices: This rank's slices.
        arena: Where the copies go; they are valid until its `reset`.
    """
    spans_of = _merged_spans(ranges)
    hulls = [_hull(spans_of.get(index)) for index in range(len(slices))]
    offsets, num_bytes = [], 0
    for held, (first, last) in zip(slices, hulls, strict=True):
        offsets.append(num_bytes)
        num_bytes += -(-(last - first) * held.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    copies = [
        _Copy(slices[index], span, offsets[index] + (span[0] - hulls[index][0]) * slices[index].dtype.itemsize)
        for index, spans in spans_of.items()
        for span in spans
    ]
    is_pinned = wait_for_devices(each.held.tensor for each in copies)
    memory = arena.take(num_bytes, is_pinned=is_pinned)
    _copy_all(copies, memory)
    return _StagedSlices(slices, hulls, offsets, memory)


def _merged_spans(ranges: Sequence[WriteRange]) -> dict[int, list[Span]]:
    """Returns for each slice the spans of its ranges in order, those that follow each other as one."""
    spans_of: dict[int, list[Span]] = {}
    for part in ranges:
        spans_of.setdefault(part.slice_index, []).append(part.span)
    for spans in spans_of.values():
        if len(spans) > 1:
            spans[:] = _merged(sorted(spans))
    return spans_of


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    first, last = spans[0]
    for start, stop in spans:
        if start > last:
            yield first, last
            first = start
        last = max(last, stop)
    yield first, last


def _hull(spans: list[Span] | None) -> Span:
    """Returns the first element and one past the last; memory for what is between two spans is never touched."""
    return (spans[0][0], spans[-1][1]) if spans else (0, 0)


def _copy_all(copies: Sequence[_Copy], memory: torch.Tensor) -> None:
    def work(job: list[_Copy]) -> None:
        for each in job:
            start = each.held.span[0]
            target = each.target(memory)
            copy_elements(each.held.tensor, each.span[0] - start, each.span[1] - start, target, each.held.dtype)

    jobs = list(_jobs(each for each in copies if not _is_sent_at_once(each, memory)))
    run_in_threads(work, jobs, min(_NUM_THREADS, len(jobs)))
    wait_for_devices(each.held.tensor for each in copies)


def _is_sent_at_once(each: _Copy, memory: torch.Tensor) -> bool:
    """Starts the transfer of what a device can send as it is, without waiting for it; returns whether it did."""
    tensor, dtype, start = each.held.tensor.detach(), each.held.dtype, each.held.span[0]
    if tensor.device.type == "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return False
    target = each.target(memory).view(dtype)
    target.copy_(tensor.view(-1)[each.span[0] - start : each.span[1] - start], non_blocking=True)
    return True


def _jobs(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Yields the copies in lists of about one block; large ones are cut."""
    job: list[_Copy] = []
    room = BLOCK_BYTES
    for each in copies:
        step = BLOCK_BYTES // each.held.dtype.itemsize
        for start in range(*each.span, step):
            offset = each.offset + (start - each.span[0]) * each.held.dtype.itemsize
            job.append(_Copy(each.held, (start, min(start + step, each.span[1])), offset))
            room -= job[-1].num_bytes
            if room <= 0:
                yield job
                job, room = [], BLOCK_BYTES
    if job:
        yield job
