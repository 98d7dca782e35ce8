"""Device-to-host staging of the ranges that this rank writes, into memory that is reused from save to save."""

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

# The training waits for the copy, so a few threads share it: plain Python threads, because torch's intra-op threads
# spin while they wait (see `copy_elements`).
_NUM_THREADS = 4
_ALIGNMENT = 64  # of each copy, for SIMD loads

Span = tuple[int, int]


class Arena:
    """Host memory for the copies of one save, reused by later saves: fresh memory costs more than the copy itself.

    It grows to what a save needs. Blocks that a save leaves unused are freed by the next `reset`.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, num_bytes: int, *, is_pinned: bool = False) -> torch.Tensor:
        """Allocate bytes at a multiple of `PAGE_BYTES`; valid until `reset`.

        Args:
            num_bytes: Size.
            is_pinned: If True, use pinned memory.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        fitting = [block for block in self._blocks if block.is_pinned == is_pinned and block.room >= num_bytes]
        if not fitting:
            self._blocks = [block for block in self._blocks if block.used > 0]  # free before allocating
            fitting = [_Block(num_bytes, is_pinned)]
            self._blocks += fitting
        return min(fitting, key=lambda block: block.room).take(num_bytes)

    def reset(self) -> None:
        """Reclaim all allocations, which must no longer be in use, and free blocks that were not used."""
        self._blocks = [block for block in self._blocks if block.used > 0]
        for block in self._blocks:
            block.used = 0

    @property
    def num_bytes(self) -> int:
        """Total size of the arena in bytes."""
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
    """Elements of a slice and their offset in the arena's memory."""

    held: TensorSlice
    span: Span
    offset: int

    @property
    def num_bytes(self) -> int:
        return (self.span[1] - self.span[0]) * self.held.dtype.itemsize

    def target(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.num_bytes]


class _StagedSlices(Sequence[TensorSlice]):
    """Slices over the arena's memory, built lazily in the background thread.

    No references to the original tensors are kept, so the training may free them.

    Args:
        slices: Original slices.
        spans: Copied range (start, stop) of each.
        offsets: Offset of each copy in `memory`.
        memory: Arena memory with the copies.
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
    """Copy what the ranges write into the arena and return the copies as slices, for `write_ranges`.

    After it returns, the caller may modify its tensors. Memory: the bytes of the ranges, in the dtype of the file.
    Collective: no.

    Args:
        ranges: Ranges that are written from this rank's memory.
        slices: This rank's slices.
        arena: Memory for the copies; they are valid until its `reset`.
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
    """Return each slice's spans in order, with adjacent ones merged."""
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
    """Return the enclosing span; memory between two spans is never touched."""
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
    """Start a non-blocking transfer if the device can send the tensor without conversion; return whether it did."""
    tensor, dtype, start = each.held.tensor.detach(), each.held.dtype, each.held.span[0]
    if tensor.device.type == "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return False
    target = each.target(memory).view(dtype)
    target.copy_(tensor.view(-1)[each.span[0] - start : each.span[1] - start], non_blocking=True)
    return True


def _jobs(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Group the copies into lists of about one block; large copies are split."""
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
