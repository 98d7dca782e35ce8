"""Chunk manager: gathers, prefetches and releases the weights of chunks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from booster.comm import any_rank, broadcast_numbers, group_size, is_fake_world, raise_on_all_ranks
from booster.device import memory_allocated
from booster.errors import ConfigError
from booster.plugins.sharding.buffer_pool import Buffer, BufferPool
from booster.plugins.sharding.collective_order import (
    AgreedCollectives,
    OrderNegotiation,
    OrderReplay,
    PassKind,
    RankRequest,
)

from .chunk import Chunk, ChunkParam
from .config import GeminiSettings
from .placement import ChunkBytes, ChunkLocations, Cursor, Placement, Trace, Tracer, evictions
from .tiers import Tier, Transfer, finish_transfer

# Note [Order of reductions]
# All ranks reduce chunks in the same order: from the last chunk to the first in the first backward, and afterwards in
# the order in which rank 0 completed them. A rank is *ready* for the first n of them. A chunk of which some rank has no
# gradients, because of other control flow, is reduced late, when backward ends: one all-reduce of a byte per chunk
# determines the chunks left on any rank, and ranks without gradients contribute zeros. After the first backward a chunk
# is complete without parameters whose gradients have never arrived on any rank.

# Note [Where gradients are]
# A gradient shard is in the tier of its weights. If the host updates the chunk, it is in host memory also where the
# weights are not: it has to get there anyway, and travels during backward, through pinned memory.


class GradientReduction:
    """Gradient reduction of all chunks, which overlaps with backward if it is asynchronous."""

    def __init__(self, manager: ChunkManager, *, is_asynchronous: bool) -> None:
        self._manager = manager
        self._is_asynchronous = is_asynchronous
        self._in_flight: deque[Chunk] = deque()
        self._storing: deque[tuple[Sequence[Buffer | None], Transfer]] = deque()
        self._order = [chunk.index for chunk in reversed(manager.chunks) if chunk.layout.trains]
        self._completed: dict[int, None] = {}  # in order
        self._num_issued = 0
        self._knows_order = False
        self._order_to_come: list[int] | None = None
        self._has_news = False
        self.num_ready = 0

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks behind the others."""
        self._order += [chunk.index for chunk in chunks if chunk.layout.trains]

    # During backward.

    def on_grad_ready(self, param: ChunkParam) -> None:
        """Handle a gradient that has arrived in `.grad`."""
        chunk, manager = param.chunk, self._manager
        self._has_news = self._has_news or not param.is_expected
        if chunk.is_reducing:  # a second gradient in the same backward must not change a buffer in flight
            self.finish_all()
        chunk.on_grad_ready(param, manager.take_buffer)
        if chunk.is_complete and chunk.index not in self._completed:
            self._complete(chunk)

    def _complete(self, chunk: Chunk) -> None:
        manager = self._manager
        self._completed[chunk.index] = None
        if chunk.can_be_released and not manager.is_needed_again(chunk):
            manager.release(chunk)
        before = self.num_ready
        while self.num_ready < len(self._order) and self._order[self.num_ready] in self._completed:
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
            self.finish_all()
        self.allocate_sums(chunk)
        chunk.start_reduce(self._manager.take_buffer)
        if chunk.grad_shard.has_streams:  # its sum and copy are started, too
            self._finish(chunk)
        else:
            self._in_flight.append(chunk)
        if not self._is_asynchronous:
            self.finish_all()

    def allocate_sums(self, chunk: Chunk) -> None:
        """Allocate a chunk's gradient shard uninitialized, unless it exists; see Note [Where gradients are]."""
        if chunk.grad_shard.tensor is None and not chunk.grad_shard.is_offloaded:
            locations, tier = self._manager.locations, self._manager.tier
            is_updated_there = tier is not None and tier.name == "host" and chunk.index in locations.states
            is_offloaded = is_updated_there or chunk.index in locations.weights
            chunk.grad_shard.allocate(tier if is_offloaded else None)

    def finish_oldest(self) -> bool:
        """Wait for the oldest reduction in flight, or its copy to the offload tier; return False if there is none."""
        if self._storing:
            buffers, transfer = self._storing.popleft()
            finish_transfer(transfer)
            self._manager.pool.release(*buffers)
        elif self._in_flight:
            self._finish(self._in_flight.popleft())
        else:
            return False
        return True

    def _finish(self, chunk: Chunk) -> None:
        buffers, transfer = chunk.finish_reduce()
        if transfer is None:
            self._manager.pool.release(*buffers)
        else:
            self._storing.append((buffers, transfer))

    def finish_all(self) -> None:
        """Wait for all reductions in flight."""
        while self.finish_oldest():
            pass

    # At the end of backward.

    @property
    def has_late_grads(self) -> bool:
        """Whether the ranks have to synchronize gradients at the end of backward."""
        is_left = any(chunk.has_gradients and not chunk.is_reducing for chunk in self._manager.chunks)
        return is_left or self._has_news or not self._knows_order

    def reduce_late_grads(self) -> None:
        """Reduce late gradients of any rank, and synchronize which gradients are expected.

        A gradient is late if its reduction has not started. Collective over the shard group.
        """
        chunks = self._manager.chunks
        params = [param for chunk in chunks for param in chunk.params]
        left = [chunk.has_gradients and not chunk.is_reducing for chunk in chunks]
        if not self._knows_order and self._completed:
            for param in params:
                param.is_expected = param.is_used
        group = self._manager.negotiation.group
        agreed = any_rank([*left, *(param.is_expected or param.is_used for param in params)], group)
        for param, is_expected in zip(params, agreed[len(chunks) :], strict=True):
            param.is_expected = is_expected
        for chunk in chunks:
            chunk.update_expected()
        if not self._knows_order:
            order = [*dict.fromkeys([*self._completed, *self._order])]
            num_completed, *order = broadcast_numbers([len(self._completed), *order], group)
            if num_completed > 0:
                self._order_to_come = order
        for chunk, is_left in zip(chunks, agreed, strict=False):
            if is_left:
                self._start(chunk)
        self.finish_all()

    def finish_backward(self) -> None:
        """Finish all reductions and reset for the next backward."""
        self.finish_all()
        if self._order_to_come is not None:
            self._order, self._knows_order, self._order_to_come = self._order_to_come, True, None
        # Chunks without expected gradients come last.
        chunks = self._manager.chunks
        self._order.sort(key=lambda index: not any(param.is_expected for param in chunks[index].params))
        self.abort()
        self._has_news = False

    def abort(self) -> None:
        """Reset the progress of the backward. Gradients that have arrived are kept."""
        self._completed.clear()
        self._num_issued = self.num_ready = 0

    # Between backwards.

    def reset(self, *, keeps_use: bool = False) -> None:
        """Drop the gradients of the accumulation; with `keeps_use`, parameters that had one keep a gradient of zero."""
        self.finish_all()
        for chunk in self._manager.chunks:
            self._manager.pool.release(chunk.drop_gradients())
            for param in chunk.params:
                param.is_used = param.is_used and keeps_use


# Note [Eviction order]
# The placement limits the bytes of buffers in the compute tier at each point of an iteration. To allocate a buffer, the
# manager frees, in this order: weights that this iteration no longer needs; buffers of reductions in flight, after a
# wait; and weights whose next use is farthest away. It never evicts weights of running modules, chunks in flight and
# unreduced gradients. If nothing else is left, the budget is exceeded, as operators need their full weights.


class ChunkManager:
    """Manager of a model's chunks.

    Args:
        chunks: All chunks, by index.
        settings: Sharding settings.
        placement: Placement policy, which sets the memory budget.

    Attributes:
        negotiation: Negotiation between the ranks of the shard group.
        tier: Offload tier; None as long as nothing is offloaded.
        state_bytes: Function that returns the bytes of this rank's master weights and optimizer states of a chunk.
        on_trace: Function called after the traced iteration.
        tracer: Tracer of the current iteration, if it is traced.
    """

    def __init__(self, chunks: Sequence[Chunk], settings: GeminiSettings, placement: Placement) -> None:
        self.chunks = list(chunks)
        self._settings = settings
        self.negotiation = OrderNegotiation(settings.order_group, 2 + placement.max_prefetch)
        self._replay: OrderReplay[RankRequest, AgreedCollectives] = OrderReplay(self._run)
        self.tier: Tier | None = None
        self.pool = BufferPool(settings.device)
        self.locations = ChunkLocations()
        self.phase = PassKind.FORWARD
        self.is_whole = False
        self.placement = placement
        self.state_bytes: Callable[[Chunk], int] = Chunk.adam_state_bytes
        self.tracer: Tracer | None = None
        self._cursor: Cursor | None = None
        self._protected: frozenset[int] = frozenset()
        self._last_use: Counter[int] = Counter()
        self._clock = 0
        self._is_aside = False
        self._awaits_backward = False
        self._current: tuple[int, ...] = ()
        self._chunk_at: dict[int, Chunk] = {}
        self._sizes: list[ChunkBytes] | None = None
        self._gather_budget_at: dict[int, int] = {}
        self._gathered: dict[int, Chunk] = {}
        self.on_trace: Callable[[], None] = lambda: None
        self.reduction = GradientReduction(self, is_asynchronous=settings.config.enable_async_reduce)

    def note_addresses(self, chunks: Iterable[Chunk]) -> None:
        """Register the addresses of the gathered chunks among these."""
        for chunk in chunks:
            if chunk.gathered is not None:
                self._chunk_at[chunk.gathered.data_ptr()] = chunk

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Append allocated chunks. The trace is dropped and recorded again."""
        self.chunks += chunks
        self.note_addresses(chunks)
        self._cursor = self._sizes = None
        self._gather_budget_at.clear()
        self.reduction.add(chunks)

    @property
    def trace(self) -> Trace | None:
        """Trace of an iteration, or None before the first."""
        return None if self._cursor is None else self._cursor.trace

    # Placement.

    def needed_tier(self) -> Tier:
        """Return the offload tier, created on first use."""
        if self.tier is None:
            self.tier = self._settings.new_tier()
        return self.tier

    def disk_of_states(self, index: int) -> Tier | None:
        """Return the tier of a chunk's optimizer states if that is a disk."""
        is_on_disk = self.tier is not None and self.tier.name == "disk" and index in self.locations.states
        return self.tier if is_on_disk else None

    def sizes(self) -> list[ChunkBytes]:
        """Return the sizes of all chunks as of the last `choose_locations` call."""
        if self._sizes is None:
            self._sizes = [
                ChunkBytes(
                    gathered=chunk.layout.num_bytes,
                    weights=chunk.weights.num_bytes,
                    gradients=chunk.grad_shard.num_bytes if chunk.layout.trains else 0,
                    states=self.state_bytes(chunk),
                )
                for chunk in self.chunks
            ]
        return self._sizes

    def choose_locations(self) -> ChunkLocations:
        """Return the locations of all shards by the placement policy. Collective: an error is raised on all ranks.

        Raises:
            ConfigError: The budget is too small.
        """
        self._sizes, found = None, self.locations
        self._gather_budget_at.clear()
        failure: ConfigError | None = None
        try:
            found = self.placement.locations(self.sizes(), self.trace)
        except ConfigError as error:  # raised by all ranks below
            failure = error
        raise_on_all_ranks(failure, self._settings.control_group or self._settings.data_parallel_group)
        return found

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of chunks and buffers in the compute tier, without master weights and optimizer states."""
        return self.pool.bytes_held + sum(chunk.bytes_in_memory for chunk in self.chunks)

    # Iterations.

    def begin_forward(self, *, trains: bool) -> None:
        """Start a forward of the outermost module, which a backward follows if it `trains`. Collective."""
        if not self.is_whole:
            self._begin_pass(PassKind.FORWARD, trains)
        self._current = ()
        if self._cursor is None:
            if trains and self.tracer is None:
                self.tracer = Tracer()
        elif not self._awaits_backward:
            self._cursor.restart()
        self._awaits_backward = trains

    def begin_backward(self) -> None:
        """Start a backward. Collective."""
        self._begin_pass(PassKind.BACKWARD, True)

    def _begin_pass(self, phase: PassKind, trains: bool) -> None:
        """Begin a pass, and replay it if all ranks begin it with the same record; see Note [Replayed passes]."""
        self._replay.abort(others_go_on=self.phase is PassKind.FORWARD)  # one that has not ended
        self._replay.replay_rest()
        self.phase = phase
        if group_size(self.negotiation.group) == 1:
            return
        begins, is_unanimous = self._replay.digest((phase, trains)), False
        if begins:
            requests = self.negotiation.exchange(self._request(begins=begins))
            self._run(AgreedCollectives.of(requests))
            is_unanimous = all(request.begins == begins for request in requests)
        self._replay.begin((phase, trains), replays=is_unanimous)

    def end_forward(self, *, trains: bool) -> None:
        """Finish a forward of the outermost module, and serve the pending requests of other ranks. Collective."""
        if self.is_whole:  # all weights are gathered, so that ranks may run different code
            return
        self.close()
        if not trains:
            self.release_all()
        for chunk in self._gathered.values():
            chunk.hide()

    def end_backward(self) -> None:
        """Finish a backward: reduce late gradients and release all weights. Collective."""
        self.close()
        self.reduction.finish_backward()
        self.release_all()
        if self.tracer is not None:
            self._cursor, self.tracer = Cursor(self.tracer.trace()), None
            self._gather_budget_at.clear()
            self.on_trace()
        self.restart()

    def restart(self) -> None:
        """Return to the start of an iteration; the trace of a failed pass is dropped."""
        self.tracer = None
        # Reductions of a failed backward are not known any more.
        self._replay.abort(others_go_on=self.phase is PassKind.FORWARD)
        for chunk in self._gathered.values():
            chunk.hide()
        self.phase = PassKind.FORWARD
        self._current = ()
        self._awaits_backward = False
        if self._cursor is not None:
            self._cursor.restart()

    def close(self) -> None:
        """Negotiate until every rank has finished its pass. Collective."""
        self._replay.replay_rest()
        while True:
            has_late_grads, repeats = self.reduction.has_late_grads, self._replay.repeats
            request = self._request(is_done=True, has_late_grads=has_late_grads, repeats=repeats)
            requests = self.negotiation.exchange(request)
            agreed = AgreedCollectives.of(requests)
            self._run(agreed)
            if all(request.is_done for request in requests):
                break
            self._replay.record(None, agreed)
        self._replay.end(all_repeat=all(request.repeats for request in requests))
        if self.phase is PassKind.BACKWARD:
            if any(request.has_late_grads for request in requests):
                self.reduction.reduce_late_grads()
            else:
                self.reduction.finish_all()

    def release_all(self) -> None:
        """Release every chunk that is not kept gathered; on the CPU the buffers wait for the next pass.

        New memory of the host is many times slower, and accelerators have an allocator that keeps it. With offloading,
        memory is what is missing, so that the buffers are freed.
        """
        for chunk in list(self._gathered.values()):
            if chunk.is_gathering:
                chunk.finish_gather()
            if chunk.can_be_released:
                self.release(chunk)
        if self.tier is not None or self._settings.device.type != "cpu":
            self.pool.trim()

    # Weights.

    def need(self, params: Sequence[ChunkParam]) -> None:
        """Gather the weights of some parameters, and upcoming ones if the memory budget allows.

        Collective unless nothing is to be gathered (Note [Collective order]).
        """
        if torch.is_inference_mode_enabled():  # autograd refuses what is made there, and training uses it later
            with torch.inference_mode(False), torch.no_grad():
                self.need(params)
            return
        chunks = {param.chunk.index: param.chunk for param in params}
        self._note_use(tuple(chunks))
        for chunk in chunks.values():
            if chunk.is_gathering:
                chunk.finish_gather()
            elif chunk.is_gathered:
                chunk.show()
        missing = _missing(params)
        before, self._protected = self._protected, self._protected | frozenset(chunks)
        try:
            while missing:
                self.negotiate([*missing, *self._ahead(skip=missing)])
                for index in missing:
                    if self.chunks[index].is_gathering:
                        self.chunks[index].finish_gather()
                missing = _missing(params)
            self._prefetch(chunks.values())
        finally:
            self._protected = before

    def negotiate(self, gather_requests: Sequence[int]) -> None:
        """Negotiate with the other ranks and run the resulting collectives. Collective (Note [Collective order])."""
        request = self._request(gather_requests=tuple(gather_requests[: self.negotiation.max_gather_requests]))
        agreed = self._replay.replay(request)
        if agreed is None:
            agreed = AgreedCollectives.of(self.negotiation.exchange(request))
            self._replay.record(request, agreed)
        self._run(agreed, request.gather_requests)

    def _request(self, **fields: Any) -> RankRequest:
        return RankRequest(phase=self.phase, num_ready=self.reduction.num_ready, **fields)

    def _run(self, agreed: AgreedCollectives, own_requests: Sequence[int] = ()) -> None:
        """Run agreed collectives, of which this rank has requested some gathers."""
        self.reduction.start_agreed(agreed.num_ready)
        for index in agreed.gathers:
            self._gather(self.chunks[index], is_own_wish=index in own_requests)

    def _gather(self, chunk: Chunk, *, is_own_wish: bool) -> None:
        if chunk.is_gathering:  # another rank has not gathered it, or has released it
            chunk.finish_gather()
        if chunk.has_all_weights:
            chunk.start_gather(None, self.take_buffer)
            chunk.finish_gather()
            return
        self.pool.release(chunk.start_gather(self.take_buffer(chunk.layout.num_bytes), self.take_buffer))
        self.note_addresses((chunk,))
        self._gathered[chunk.index] = chunk
        if not is_own_wish:
            chunk.finish_gather()
            if chunk.can_be_released:
                self.release(chunk)

    def _prefetch(self, needed: Collection[Chunk]) -> None:
        """Prefetch upcoming chunks if the memory budget allows; a reduction that starts then leaves needed weights."""
        ahead = self._ahead(skip=())
        if not ahead:
            return
        for chunk in needed:
            chunk.pin(())
        try:
            self.negotiate(ahead)
        finally:
            for chunk in needed:
                chunk.unpin(())

    def _ahead(self, skip: Sequence[int]) -> list[int]:
        if self._is_aside or self.is_whole or self.placement.max_prefetch == 0 or self._cursor is None:
            return []
        upcoming = self._cursor.trace.upcoming(self._cursor.now + 1, self.placement.max_prefetch)
        found: list[int] = []
        unneeded = self._releasable(only_unneeded=True)
        taken = self.pool.bytes_in_use - sum(chunk.layout.num_bytes for chunk in unneeded)
        free = self._gather_budget() - taken - sum(self.chunks[index].layout.num_bytes for index in skip)
        for index in upcoming:
            chunk = self.chunks[index]
            if chunk.gathered is not None or index in skip or index in found:
                continue
            if chunk.layout.num_bytes > free:
                break
            free -= chunk.layout.num_bytes
            found.append(index)
        return found

    def release(self, chunk: Chunk) -> None:
        """Release the gathered weights of a chunk."""
        self.pool.release(chunk.release())
        self._gathered.pop(chunk.index, None)

    # Memory budget.

    def take_buffer(self, num_bytes: int) -> Buffer:
        """Return a buffer from the pool, after evictions in the order of Note [Eviction order]."""
        budget = self._gather_budget()
        self._evict(num_bytes, budget, only_unneeded=True)
        while self.pool.bytes_in_use + num_bytes > budget and self.reduction.finish_oldest():
            pass
        self._evict(num_bytes, budget, only_unneeded=False)
        return self.pool.acquire(num_bytes)

    def _gather_budget(self) -> int:
        now = 0 if self._cursor is None else self._cursor.now
        if now not in self._gather_budget_at:
            self._gather_budget_at[now] = self.placement.gather_budget(self.sizes(), self.locations, self.trace, now)
        return self._gather_budget_at[now]

    def _evict(self, num_bytes: int, budget: int, *, only_unneeded: bool) -> None:
        surplus = self.pool.bytes_in_use + num_bytes - budget
        if surplus <= 0:
            return
        candidates = self._releasable(only_unneeded=only_unneeded)
        sizes = {chunk.index: chunk.layout.num_bytes for chunk in candidates}
        for index in evictions(sizes, self._next_use, surplus):
            if self.pool.bytes_in_use + num_bytes <= budget:
                break
            self.release(self.chunks[index])

    def _releasable(self, *, only_unneeded: bool) -> list[Chunk]:
        """Chunks that may be released, or only those without another use in this iteration, according to the trace."""
        gathered = self._gathered.values()
        found = [chunk for chunk in gathered if chunk.can_be_released and chunk.index not in self._protected]
        if only_unneeded:
            return [chunk for chunk in found if self._cursor is not None and not self.is_needed_again(chunk)]
        return found

    def _next_use(self, index: int) -> int | None:
        if self._cursor is not None:
            return self._cursor.trace.next_use(index, self._cursor.now + 1)
        # Without a trace, backward visits chunks in reverse, so the least recently used one is needed last.
        return self._clock - self._last_use[index]

    def is_needed_again(self, chunk: Chunk) -> bool:
        """Whether this iteration uses a chunk's weights again, according to the trace."""
        if self._cursor is None:
            return any(param.num_saved > 0 for param in chunk.params)
        next_use = self._next_use(chunk.index)
        return next_use is not None and next_use < len(self._cursor.trace.events)

    # Events.

    def chunk_at(self, address: int) -> Chunk | None:
        """Return the chunk whose gathered buffer starts at a memory address, or None."""
        chunk = self._chunk_at.get(address)
        is_there = chunk is not None and chunk.gathered is not None and chunk.gathered.data_ptr() == address
        return chunk if is_there else None

    @contextmanager
    def aside(self, *, releases: bool = True) -> Iterator[None]:
        """Use weights outside of training: without tracing and prefetching; and without them behind it, if it releases.

        Collective at its end, if it releases.
        """
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
        if releases:
            self.end_forward(trains=False)

    def _note_use(self, indices: tuple[int, ...]) -> None:
        if self._is_aside or self.is_whole or indices == self._current:
            return
        self._current = indices
        self._clock += 1
        for index in indices:
            self._last_use[index] = self._clock
        is_backward = self.phase is PassKind.BACKWARD
        if self.tracer is not None:
            self.tracer.record_use(indices, is_backward)
        elif self._cursor is not None:
            self._cursor.advance(indices, is_backward)

    def note_other_bytes(self, saved_bytes: int) -> None:
        """Record the non-chunk bytes in the compute tier; without a counter of them, those saved by autograd."""
        if self.tracer is not None:
            has_counter = self._settings.device.type != "cpu" and not is_fake_world()
            self.tracer.record_other_bytes(
                max(0, memory_allocated() - self.bytes_in_memory) if has_counter else saved_bytes
            )


def _missing(params: Iterable[ChunkParam]) -> list[int]:
    return list(
        dict.fromkeys(param.chunk.index for param in params if not param.chunk.is_gathered or param.is_overwritten)
    )
