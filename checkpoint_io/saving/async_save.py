"""Asynchronous saves: one background thread, saves in call order, failures raised later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from booster.checkpoint_io.copy_elements import synchronize_devices
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.parallel import CheckpointGroup, batches_by_bytes, run_in_threads
from booster.checkpoint_io.planning.save_plan import BLOCK_BYTES, WriteRange
from booster.comm import fake, raise_on_all_ranks
from booster.errors import CheckpointError
from booster.interface import TensorSlice
from booster.logger import get_dist_logger

from .writer import host_memory, read_range

# The training waits for the copy, so a few threads share it: plain Python threads, because torch's intra-op threads
# spin while they wait (see `copy_elements`).
_NUM_THREADS = 4
_ALIGNMENT = 64  # of each copy, for SIMD loads


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


# Note [Staging blocks]
# torch rounds pinned memory up to a power of two, up to twice what a rank writes. So the copies of a save lie in blocks
# of at most MAX_BLOCK_BYTES, one behind the other. Ranges of the plan are shorter than that.
MAX_BLOCK_BYTES = 256 * 2**20

CopyOf = Callable[[WriteRange], TensorSlice]
_Copy = tuple[TensorSlice, WriteRange, torch.Tensor]  # a range of a slice, and the bytes that it is copied to


def stage_slices(ranges: Sequence[WriteRange], slices: Sequence[TensorSlice], arena: Arena) -> CopyOf:
    """Copy what the ranges write into the arena, for `write_ranges`.

    After it returns, the caller may modify its tensors, and free them. Memory: the bytes of the ranges, in the dtype of
    the file. Collective: no.

    Args:
        ranges: Ranges that are written from this rank's memory, no element in two of them.
        slices: This rank's slices.
        arena: Memory for the copies; they are valid until its `reset`.
    """
    places: dict[WriteRange, tuple[int, int, int]] = {}  # block, and first and last byte in it
    sizes: list[int] = []
    for each in ranges:
        num_bytes = (each.span[1] - each.span[0]) * slices[each.slice_index].dtype.itemsize
        start = -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT if sizes else 0
        if not sizes or start + num_bytes > MAX_BLOCK_BYTES:
            start = 0
            sizes.append(0)
        sizes[-1] = start + num_bytes
        places[each] = len(sizes) - 1, start, sizes[-1]
    # All but the last have one size, for later saves whose ranges differ.
    sizes[:-1] = [MAX_BLOCK_BYTES] * (len(sizes) - 1)
    used = {each.slice_index: slices[each.slice_index] for each in ranges}
    is_pinned = synchronize_devices(one.tensor for one in used.values())
    blocks = [arena.allocate(size, is_pinned=is_pinned) for size in sizes]
    # Without the tensors, which the caller may free.
    forms = {index: replace(one, span=(0, 0), tensor=torch.empty(0)) for index, one in used.items()}

    def target_of(write_range: WriteRange) -> torch.Tensor:
        block, start, stop = places[write_range]
        return blocks[block][start:stop]

    def copy_of(write_range: WriteRange) -> TensorSlice:
        form = forms[write_range.slice_index]
        return replace(form, span=write_range.span, tensor=target_of(write_range).view(form.dtype))

    _copy_all([(used[each.slice_index], each, target_of(each)) for each in ranges])
    return copy_of


def _copy_all(copies: Sequence[_Copy]) -> None:
    def work(job: list[_Copy]) -> None:
        for each in job:
            read_range(*each)

    rest = (each for each in copies if not _start_async_copy(*each))
    jobs = list(batches_by_bytes(rest, lambda each: each[2].numel(), BLOCK_BYTES))
    run_in_threads(work, jobs, min(_NUM_THREADS, len(jobs)))
    synchronize_devices(source.tensor for source, _, _ in copies)


def _start_async_copy(source: TensorSlice, write_range: WriteRange, target: torch.Tensor) -> bool:
    """Start a non-blocking transfer if the device can send the tensor without conversion; return whether it did."""
    tensor, dtype, start = source.tensor.detach(), source.dtype, source.span[0]
    if tensor.device.type == "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return False
    elements = tensor.view(-1)[write_range.span[0] - start : write_range.span[1] - start]
    target.view(dtype).copy_(elements, non_blocking=True)
    return True


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
            stage: Copies into the arena and returns the background job; a copy that fails is a failure of the job.
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
            job = stage(arena)
        except BaseException:
            self._release_arena(arena)
            raise
        with self._changed:
            self._jobs.append((job, arena, action))
            if self._thread is None and fake.replicas is None:  # in a simulation `wait` runs the jobs
                self._thread = threading.Thread(target=self._run_jobs, name="booster-async-save", daemon=False)
                self._thread.start()

    def has_failed(self) -> bool:
        """Return whether a save failed on this rank that has not been raised yet."""
        with self._changed:
            return bool(self._failures)

    def raise_failures(self) -> None:
        """Raise on every rank if a background save failed on any rank. Collective.

        A rank whose own save is still in flight waits for it before it raises.
        """
        failure = CheckpointError("a save in the background failed") if self.has_failed() else None
        try:
            raise_on_all_ranks(failure, self._ranks.group)
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
