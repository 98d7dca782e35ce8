"""Asynchronous saves: one background thread, saves in call order, failures raised later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from booster.checkpoint_io.copy_elements import copy_elements, synchronize_devices
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.parallel import CheckpointGroup, run_in_threads
from booster.checkpoint_io.planning.save_plan import BLOCK_BYTES, WriteRange
from booster.comm import fake, raise_on_all_ranks
from booster.errors import CheckpointError
from booster.interface import TensorSlice
from booster.logger import get_dist_logger

from .writer import host_memory

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
            candidates = [_ArenaBlock(host_memory(num_bytes, is_pinned=is_pinned), is_pinned)]
            self._blocks += candidates
        block = min(candidates, key=lambda block: block.free_bytes)
        allocated = block.memory[block.used : block.used + num_bytes]
        block.used = min(block.used + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, block.memory.numel())
        return allocated

    def reset(self) -> None:
        """Reclaim all allocations, which must no longer be in use, and free blocks that were not used."""
        self._blocks = [block for block in self._blocks if block.used > 0]
        for block in self._blocks:
            block.used = 0

    @property
    def num_bytes(self) -> int:
        """Total size of the arena in bytes."""
        return sum(block.memory.numel() for block in self._blocks)


@dataclass(slots=True)
class _ArenaBlock:
    memory: torch.Tensor
    is_pinned: bool
    used: int = 0

    @property
    def free_bytes(self) -> int:
        return self.memory.numel() - self.used


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
    # Of each slice; memory between two of its spans is never touched.
    enclosing_spans = [
        (spans_of[index][0][0], spans_of[index][-1][1]) if index in spans_of else (0, 0) for index in range(len(slices))
    ]
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


# Note [Staging]
# A save in flight owns the host memory that its tensors were copied into (its arena). Two arenas let a model save and
# an optimizer save follow each other without waiting. A third save waits for the first one's arena, which bounds the
# memory. Arenas are reused, because touching fresh memory costs far more than the copy itself.
_MAX_ARENAS = 2


class AsyncSaves:
    """Background saves of one process group.

    The thread runs while there are saves to write. It is not a daemon: the process does not exit before its saves end.

    Args:
        ranks: Ranks that save together.
    """

    def __init__(self, ranks: CheckpointGroup) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Arena, str]] = deque()
        self._thread: threading.Thread | None = None
        self._free: list[Arena] = []
        self._num_arenas = 0
        self._failures: list[BaseException] = []

    def start(self, stage: Callable[[Arena], Callable[[], None]], action: str) -> None:
        """Stage what is to be written and return; the write runs in the background, after all previous saves.

        Args:
            stage: Copies into the arena and returns the background job.
            action: Description of the operation for messages.
        """
        with self._changed:
            if not self._free and self._num_arenas < _MAX_ARENAS:
                self._num_arenas += 1
                arena = Arena()
            else:
                self._changed.wait_for(lambda: bool(self._free))
                arena = self._free.pop(0)  # FIFO: with alternating saves, each reuses an arena of its own size
        try:
            job = self._ranks.run_on_all_ranks(lambda: stage(arena), action)
        except BaseException:
            self._release_arena(arena)
            raise
        with self._changed:
            self._jobs.append((job, arena, action))
            if self._thread is None and fake.replicas is None:  # in a simulation `wait` runs the jobs
                self._thread = threading.Thread(target=self._run_jobs, name="booster-async-save", daemon=False)
                self._thread.start()

    def raise_failures(self) -> None:
        """Raise on every rank if a background save failed on any rank. Collective.

        A rank whose own save is still in flight waits for it before it raises.
        """
        with self._changed:
            failed = bool(self._failures)
        try:
            raise_on_all_ranks(
                CheckpointError("a save in the background failed") if failed else None, self._ranks.group
            )
        except CheckpointError:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is None)
                failures, self._failures = self._failures, []
            if failures:
                raise CheckpointError(f"a save in the background failed: {failures[0]}") from failures[0]
            raise

    def wait(self) -> None:
        """Wait until every save is on disk. Collective.

        Raises:
            CheckpointError: A save failed.
        """
        if fake.replicas is not None:
            self._run_jobs()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
        self.raise_failures()

    def _release_arena(self, arena: Arena) -> None:
        arena.reset()
        with self._changed:
            self._free.append(arena)
            self._changed.notify_all()

    def _run_jobs(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job, arena, action = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # raised by the caller's next checkpoint call; later saves must still run
                get_dist_logger().error(f"{action} in the background failed: {error}")
                with self._changed:
                    self._failures.append(error)
            finally:
                self._release_arena(arena)
