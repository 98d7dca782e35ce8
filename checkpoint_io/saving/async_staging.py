"""Device-to-host staging of the ranges that this rank writes, into memory that is reused from save to save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from booster.checkpoint_io.copy_elements import copy_elements, synchronize_devices
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
        self._blocks: list[_ArenaBlock] = []

    def allocate(self, num_bytes: int, *, is_pinned: bool = False) -> torch.Tensor:
        """Allocate bytes at a multiple of `PAGE_BYTES`; valid until `reset`.

        Args:
            num_bytes: Size.
            is_pinned: If True, use pinned memory.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        candidates = [block for block in self._blocks if block.is_pinned == is_pinned and block.free_bytes >= num_bytes]
        if not candidates:
            self._blocks = [block for block in self._blocks if block.used > 0]  # free before allocating
            candidates = [_ArenaBlock(num_bytes, is_pinned)]
            self._blocks += candidates
        return min(candidates, key=lambda block: block.free_bytes).allocate(num_bytes)

    def reset(self) -> None:
        """Reclaim all allocations, which must no longer be in use, and free blocks that were not used."""
        self._blocks = [block for block in self._blocks if block.used > 0]
        for block in self._blocks:
            block.used = 0

    @property
    def num_bytes(self) -> int:
        """Total size of the arena in bytes."""
        return sum(block.memory.numel() for block in self._blocks)


class _ArenaBlock:
    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.memory = host_memory(num_bytes, is_pinned=is_pinned)
        self.is_pinned = is_pinned
        self.used = 0

    @property
    def free_bytes(self) -> int:
        return self.memory.numel() - self.used

    def allocate(self, num_bytes: int) -> torch.Tensor:
        allocated = self.memory[self.used : self.used + num_bytes]
        self.used = min(self.used + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, self.memory.numel())
        return allocated


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements of a slice and their offset in the arena's memory."""

    source: TensorSlice
    span: Span
    offset: int

    @property
    def num_bytes(self) -> int:
        return (self.span[1] - self.span[0]) * self.source.dtype.itemsize

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
        self._metadata = [
            (source.name, source.dtype, source.global_shape, source.box, source.primary, source.shared)
            for source in slices
        ]
        self._spans = spans
        self._offsets = offsets
        self._memory = memory

    def __len__(self) -> int:
        return len(self._metadata)

    @overload
    def __getitem__(self, index: int) -> TensorSlice: ...

    @overload
    def __getitem__(self, index: slice) -> list[TensorSlice]: ...

    def __getitem__(self, index: int | slice) -> TensorSlice | list[TensorSlice]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        name, dtype, global_shape, box, primary, shared = self._metadata[index]
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
    enclosing_spans = [_enclosing_span(spans_of.get(index)) for index in range(len(slices))]
    offsets, num_bytes = [], 0
    for source, (first, last) in zip(slices, enclosing_spans, strict=True):
        offsets.append(num_bytes)
        num_bytes += -(-(last - first) * source.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    copies = [
        _Copy(
            slices[index], span, offsets[index] + (span[0] - enclosing_spans[index][0]) * slices[index].dtype.itemsize
        )
        for index, spans in spans_of.items()
        for span in spans
    ]
    is_pinned = synchronize_devices(each.source.tensor for each in copies)
    memory = arena.allocate(num_bytes, is_pinned=is_pinned)
    _copy_all(copies, memory)
    return _StagedSlices(slices, enclosing_spans, offsets, memory)


def _merged_spans(ranges: Sequence[WriteRange]) -> dict[int, list[Span]]:
    """Return each slice's spans in order, with adjacent ones merged."""
    spans_of: dict[int, list[Span]] = {}
    for write_range in ranges:
        spans_of.setdefault(write_range.slice_index, []).append(write_range.span)
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


def _enclosing_span(spans: list[Span] | None) -> Span:
    """Return the enclosing span; memory between two spans is never touched."""
    return (spans[0][0], spans[-1][1]) if spans else (0, 0)


def _copy_all(copies: Sequence[_Copy], memory: torch.Tensor) -> None:
    def work(job: list[_Copy]) -> None:
        for each in job:
            start = each.source.span[0]
            target = each.target(memory)
            copy_elements(each.source.tensor, each.span[0] - start, each.span[1] - start, target, each.source.dtype)

    jobs = list(_jobs(each for each in copies if not _start_async_copy(each, memory)))
    run_in_threads(work, jobs, min(_NUM_THREADS, len(jobs)))
    synchronize_devices(each.source.tensor for each in copies)


def _start_async_copy(each: _Copy, memory: torch.Tensor) -> bool:
    """Start a non-blocking transfer if the device can send the tensor without conversion; return whether it did."""
    tensor, dtype, start = each.source.tensor.detach(), each.source.dtype, each.source.span[0]
    if tensor.device.type == "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return False
    target = each.target(memory).view(dtype)
    target.copy_(tensor.view(-1)[each.span[0] - start : each.span[1] - start], non_blocking=True)
    return True


def _jobs(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Group the copies into lists of about one block; large copies are split."""
    job: list[_Copy] = []
    free_bytes = BLOCK_BYTES
    for each in copies:
        step = BLOCK_BYTES // each.source.dtype.itemsize
        for start in range(*each.span, step):
            offset = each.offset + (start - each.span[0]) * each.source.dtype.itemsize
            job.append(_Copy(each.source, (start, min(start + step, each.span[1])), offset))
            free_bytes -= job[-1].num_bytes
            if free_bytes <= 0:
                yield job
                job, free_bytes = [], BLOCK_BYTES
    if job:
        yield job
