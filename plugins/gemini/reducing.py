"""Gradient reduction: reduce-scatters gradients chunk by chunk during backward, in the same order on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from booster.comm import all_reduce_max, broadcast, collective_device
from booster.plugins.gemini.chunk import Chunk, ChunkParam
from booster.plugins.gemini.meeting import RankRequest

if TYPE_CHECKING:
    import torch.distributed as dist

    from booster.plugins.gemini.chunk_manager import ChunkManager

__all__ = ["GradientReduction"]

# Note [Order of reductions]
# All ranks reduce chunks in the same order: from the last chunk to the first in the first backward, and afterwards in
# the order in which rank 0 completed them. A rank is *ready* for the first n of them. A chunk of which some rank has no
# gradients, because of other control flow, is reduced late, when backward ends: one all-reduce of a byte per chunk
# determines the chunks left on any rank, and ranks without gradients contribute zeros. After the first backward a chunk
# is complete without parameters whose gradients have never arrived on any rank.


class GradientReduction:
    """Gradient reduction of all chunks.

    Args:
        manager: Manager of the chunks.
        is_asynchronous: If True, reductions overlap with backward.
    """

    def __init__(self, manager: ChunkManager, *, is_asynchronous: bool) -> None:
        self._manager = manager
        self._is_asynchronous = is_asynchronous
        self._in_flight: deque[Chunk] = deque()
        self._order = [chunk.index for chunk in reversed(manager.chunks) if chunk.layout.trains]
        self._completed: list[int] = []
        self._is_ready = [False] * len(manager.chunks)
        self._num_issued = 0
        self._knows_order = False
        self._order_to_come: list[int] | None = None
        self._has_news = False
        self.num_ready = 0

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks behind the others."""
        self._order += [chunk.index for chunk in chunks if chunk.layout.trains]
        self._is_ready += [False] * len(chunks)

    # During backward.

    def on_grad_ready(self, param: ChunkParam) -> None:
        """Handle a gradient that has arrived in `.grad`."""
        chunk, manager = param.chunk, self._manager
        self._has_news = self._has_news or not param.is_expected
        if chunk.is_reducing:  # a second gradient in the same backward must not change a buffer in flight
            self._finish_all()
        chunk.on_grad_ready(param, manager.take_buffer)
        if chunk.is_complete and not self._is_ready[chunk.index]:
            self._complete(chunk)

    def _complete(self, chunk: Chunk) -> None:
        manager = self._manager
        manager.note_complete(chunk)
        self._completed.append(chunk.index)
        self._is_ready[chunk.index] = True
        if chunk.can_be_released and not manager.is_needed_again(chunk):
            manager.release(chunk)
        before = self.num_ready
        while self.num_ready < len(self._order) and self._is_ready[self._order[self.num_ready]]:
            self.num_ready += 1
        if self.num_ready > before:
            manager.negotiate(())

    def start_agreed(self, num_ready: int) -> None:
        """Start the reductions for which every rank is ready. Collective: `num_ready` is the same on all ranks."""
        while self._num_issued < num_ready:
            chunk = self._manager.chunks[self._order[self._num_issued]]
            self._num_issued += 1
            self._start(chunk)

    def _start(self, chunk: Chunk) -> None:
        if chunk.is_reducing:  # a second round in the same backward
            self._finish_all()
        self.allocate_sums(chunk)
        chunk.start_reduce(self._manager.take_buffer)
        self._in_flight.append(chunk)
        if not self._is_asynchronous:
            self._finish_all()

    def allocate_sums(self, chunk: Chunk) -> None:
        """Allocate a chunk's gradient shard uninitialized, unless it exists."""
        if chunk.grad_shard.tensor is None and not chunk.grad_shard.is_offloaded:
            chunk.grad_shard.allocate(self._manager.sums_tier(chunk))

    def finish_oldest(self) -> bool:
        """Wait for the oldest reduction in flight; return False if there is none."""
        if not self._in_flight:
            return False
        chunk = self._in_flight.popleft()
        for buffer in chunk.finish_reduce():
            self._manager.pool.give_back(buffer)
        return True

    def _finish_all(self) -> None:
        while self.finish_oldest():
            pass

    # At the end of backward.

    @property
    def has_late_grads(self) -> bool:
        """Whether the ranks have to synchronize gradients at the end of backward."""
        is_left = any(chunk.has_gradients and not chunk.is_reducing for chunk in self._manager.chunks)
        return is_left or self._has_news or not self._knows_order

    def reduce_late_grads(self, posts: Sequence[RankRequest]) -> None:
        """Reduce late gradients of any rank. Collective over the shard group."""
        if any(post.has_late_grads for post in posts):
            for index in self._agree():
                self._start(self._manager.chunks[index])
        self._finish_all()

    def _agree(self) -> list[int]:
        """Return the chunks with late gradients on any rank, and synchronize which gradients are expected."""
        chunks = self._manager.chunks
        slots = [param for chunk in chunks for param in chunk.params]
        left = [chunk.has_gradients and not chunk.is_reducing for chunk in chunks]
        learns = not self._knows_order and bool(self._completed)
        if learns:
            for param in slots:
                param.is_expected = param.is_used
        facts = left + [param.is_expected or param.is_used for param in slots]
        group = self._manager.negotiation.group
        mask = torch.tensor(facts, dtype=torch.uint8, device=collective_device(group))
        agreed = all_reduce_max(mask, group).tolist()
        for param, is_expected in zip(slots, agreed[len(chunks) :], strict=True):
            param.is_expected = bool(is_expected)
        for chunk in chunks:
            chunk.update_expected()
        if not self._knows_order:
            self._agree_on_order(group)
        return [index for index, is_left in enumerate(agreed[: len(chunks)]) if is_left]

    def _agree_on_order(self, group: dist.ProcessGroup | None) -> None:
        order = [*dict.fromkeys([*self._completed, *self._order])]
        facts = torch.tensor([len(self._completed), *order], dtype=torch.int64, device=collective_device(group))
        broadcast([facts], group)
        num_completed, *order = facts.tolist()
        if num_completed > 0:
            self._order_to_come = order

    def finish_backward(self) -> None:
        """Finish all reductions and reset for the next backward."""
        self._finish_all()
        if self._order_to_come is not None:
            self._order, self._knows_order, self._order_to_come = self._order_to_come, True, None
        self._order = [index for index in self._order if self._is_expected(index)] + [
            index for index in self._order if not self._is_expected(index)
        ]
        self.abort()
        self._has_news = False

    def abort(self) -> None:
        """Reset the progress of the backward. Gradients that have arrived are kept."""
        self._completed.clear()
        self._is_ready = [False] * len(self._manager.chunks)
        self._num_issued = self.num_ready = 0

    # Between backwards.

    @property
    def has_local(self) -> bool:
        """Whether this rank has unreduced gradients."""
        return any(chunk.has_gradients for chunk in self._manager.chunks)

    def reduce_local(self) -> None:
        """Reduce the unreduced gradients of all ranks. Collective over the shard group."""
        for index in self._agree():
            self._start(self._manager.chunks[index])
        self._finish_all()
        self._manager.pool.trim()

    def reset(self, *, keeps_use: bool = False) -> None:
        """Drop the gradients of the accumulation.

        Args:
            keeps_use: If True, parameters that had a gradient continue with a zero gradient.
        """
        self._finish_all()
        for chunk in self._manager.chunks:
            buffer = chunk.drop_gradients()
            if buffer is not None:
                self._manager.pool.give_back(buffer)
            for param in chunk.params:
                param.is_used = param.is_used and keeps_use

    def _is_expected(self, index: int) -> bool:
        return any(param.is_expected for param in self._manager.chunks[index].params)
