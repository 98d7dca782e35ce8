"""Asynchronous saves: one background thread, saves in call order, failures raised later."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """Elements of a slice, and the bytes that they are copied to."""

    source: TensorSlice
    span: Span
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return (self.span[1] - self.span[0]) * self.source.dtype.itemsize


# Note [Staging blocks]
# torch rounds pinned memory up to a power of two, up to twice what a rank writes. So the copies of a save lie in blocks
# of at most MAX_BLOCK_BYTES. Ranges of the plan are shorter than that; each lies in one block, behind the one before
# it, so that a slice may be continued in the next block.
MAX_BLOCK_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Segment:
    """Consecutive elements of a slice in one block."""

    span: Span
    block: int
    offset: int


class StagedSlices:
    """Copies of the ranges of a save in the arena's memory; see `slice_of`.

    No references to the original tensors are kept, so the training may free them.

    Args:
        slices: Original slices.
        segments: Copied segments of each slice, by index, in order.
        blocks: Arena memory with the copies.
    """

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        segments: Mapping[int, Sequence[_Segment]],
        blocks: Sequence[torch.Tensor],
    ) -> None:
        self._metadata = {
            index: {
                key: getattr(slices[index], key)
                for key in ("name", "dtype", "global_shape", "box", "primary", "shared")
            }
            for index in segments
        }
        self._segments = segments
        self._blocks = blocks

    def slice_of(self, write_range: WriteRange) -> TensorSlice:
        """Return the copied slice that contains a range, built anew at each call."""
        index = write_range.slice_index
        segments, metadata = self._segments[index], self._metadata[index]
        found = segments[bisect_right(segments, write_range.span[0], key=lambda segment: segment.span[0]) - 1]
        start, stop = found.span
        num_bytes = (stop - start) * metadata["dtype"].itemsize
        copied = self._blocks[found.block][found.offset : found.offset + num_bytes]
        return TensorSlice(span=found.span, tensor=copied.view(metadata["dtype"]), **metadata)


def stage_slices(ranges: Sequence[WriteRange], slices: Sequence[TensorSlice], arena: Arena) -> StagedSlices:
    """Copy what the ranges write into the arena, for `write_ranges`.

    After it returns, the caller may modify its tensors. Memory: the bytes of the ranges, in the dtype of the file.
    Collective: no.

    Args:
        ranges: Ranges that are written from this rank's memory, no element in two of them.
        slices: This rank's slices.
        arena: Memory for the copies; they are valid until its `reset`.
    """
    segments, sizes = _layout(ranges, slices)
    is_pinned = synchronize_devices(slices[index].tensor for index in segments)
    blocks = [arena.allocate(size, is_pinned=is_pinned) for size in sizes]
    copies = [
        _Copy(slices[index], one.span, blocks[one.block][one.offset :][: _num_bytes(one.span, slices[index])])
        for index, parts in segments.items()
        for one in parts
    ]
    _copy_all(copies)
    return StagedSlices(slices, segments, blocks)


def _layout(ranges: Sequence[WriteRange], slices: Sequence[TensorSlice]) -> tuple[dict[int, list[_Segment]], list[int]]:
    """Return the segments of each slice that the ranges use, and the sizes of the blocks."""
    spans_of: dict[int, list[Span]] = {}
    for write_range in ranges:
        spans_of.setdefault(write_range.slice_index, []).append(write_range.span)
    segments: dict[int, list[_Segment]] = {}
    sizes: list[int] = []
    for index, spans in spans_of.items():
        parts = segments.setdefault(index, [])
        for start, stop in sorted(spans):
            num_bytes = _num_bytes((start, stop), slices[index])
            if parts and parts[-1].span[1] == start and sizes[-1] + num_bytes <= MAX_BLOCK_BYTES:
                parts[-1].span = (parts[-1].span[0], stop)
                sizes[-1] += num_bytes
                continue
            offset = -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT if sizes else 0
            if not sizes or offset + num_bytes > MAX_BLOCK_BYTES:
                offset = 0
                sizes.append(0)
            parts.append(_Segment((start, stop), len(sizes) - 1, offset))
            sizes[-1] = offset + num_bytes
    # All but the last have one size, for later saves whose ranges differ.
    return segments, [*(MAX_BLOCK_BYTES for _ in sizes[:-1]), *sizes[-1:]]


def _num_bytes(span: Span, source: TensorSlice) -> int:
    return (span[1] - span[0]) * source.dtype.itemsize


def _copy_all(copies: Sequence[_Copy]) -> None:
    def work(job: list[_Copy]) -> None:
        for each in job:
            start = each.source.span[0]
            copy_elements(
                each.source.tensor, each.span[0] - start, each.span[1] - start, each.target, each.source.dtype
            )

    jobs = list(_jobs(each for each in copies if not _start_async_copy(each)))
    run_in_threads(work, jobs, min(_NUM_THREADS, len(jobs)))
    synchronize_devices(each.source.tensor for each in copies)


def _start_async_copy(each: _Copy) -> bool:
    """Start a non-blocking transfer if the device can send the tensor without conversion; return whether it did."""
    tensor, dtype, start = each.source.tensor.detach(), each.source.dtype, each.source.span[0]
    if tensor.device.type == "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return False
    source = tensor.view(-1)[each.span[0] - start : each.span[1] - start]
    each.target.view(dtype).copy_(source, non_blocking=True)
    return True


def _jobs(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Group the copies into lists of about one block of the file; large copies are split."""
    job: list[_Copy] = []
    free_bytes = BLOCK_BYTES
    for each in copies:
        itemsize = each.source.dtype.itemsize
        for start in range(*each.span, BLOCK_BYTES // itemsize):
            stop = min(start + BLOCK_BYTES // itemsize, each.span[1])
            first, last = ((place - each.span[0]) * itemsize for place in (start, stop))
            job.append(_Copy(each.source, (start, stop), each.target[first:last]))
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
