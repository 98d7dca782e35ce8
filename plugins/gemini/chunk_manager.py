"""Which chunks are gathered: the one place where weights are gathered, prefetched and released."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist

from booster.comm import raise_on_all_ranks
from booster.errors import ConfigError
from booster.plugins.gemini.chunk import Chunk, Slot
from booster.plugins.gemini.meeting import Meeting, Phase, Post
from booster.plugins.gemini.placement import ChunkBytes, Homes, Placement, evictions
from booster.plugins.gemini.reducing import GradientReduction
from booster.plugins.gemini.tiers import Tier
from booster.plugins.gemini.tracer import Cursor, Record, Tracer
from booster.plugins.sharding.buffer_pool import Buffer, BufferPool

__all__ = ["ChunkManager"]

# Note [Room]
# The placement says how many bytes of buffers may be in the compute tier at a moment. A buffer is made room for by
# giving up, in this order: weights that this iteration needs no more; reductions under way, which are waited for; and
# weights whose next use is farthest away. What a running module uses, what arrives, and gradients that are not reduced
# yet stay: if nothing else is left, the buffer is taken all the same, as no operator runs on a part of its weights.


class ChunkManager:
    """The chunks of a model.

    Args:
        chunks: All of them, by index.
        meeting: Of the ranks that share them.
        device: The compute tier's.
        placement: What may be in the compute tier.
        agreement_group: All data-parallel ranks, on the CPU; None: the world.
        make_tier: Makes where the rest goes.
        max_prefetch: How many chunks are gathered ahead.
        reduces_asynchronously: Whether a reduction goes on while backward does.
        other_bytes: Returns the bytes of everything in the compute tier that is not of chunks, as far as it is known.

    Attributes:
        state_bytes: Returns for a chunk the bytes of this rank's masters and optimizer states.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        meeting: Meeting,
        device: torch.device,
        placement: Placement,
        agreement_group: dist.ProcessGroup | None,
        make_tier: Callable[[], Tier],
        max_prefetch: int,
        reduces_asynchronously: bool,
        other_bytes: Callable[[], int],
    ) -> None:
        self.chunks = list(chunks)
        self.meeting = meeting
        self.tier: Tier | None = None
        self._make_tier = make_tier
        self._agreement_group = agreement_group
        self.pool = BufferPool(device)
        self.homes = Homes(weights=frozenset(), states=frozenset(), kept=frozenset())
        self.record: Record | None = None
        self.phase = Phase.FORWARD
        self.is_whole = False
        self._placement = placement
        self._max_prefetch = max_prefetch
        self.other_bytes = other_bytes
        self.state_bytes: Callable[[Chunk], int] = adam_state_bytes
        self._tracer = Tracer()
        self._cursor: Cursor | None = None
        self._protected: frozenset[int] = frozenset()
        self._last_use = [0] * len(self.chunks)
        self._clock = 0
        self._is_aside = False
        self._awaits_backward = False
        self._current: tuple[int, ...] = ()
        self._chunk_at: dict[int, Chunk] = {}
        self._sizes: list[ChunkBytes] | None = None
        self._room_at: dict[int, int] = {}
        self._gathered: dict[int, Chunk] = {}
        self.on_record: Callable[[], None] = _nothing
        self.reduction = GradientReduction(self, is_asynchronous=reduces_asynchronously)

    def note_filled(self) -> None:
        """Called when the chunks have got their memory."""
        for chunk in self.chunks:
            self._note_address(chunk)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Takes further chunks, with memory, behind the others; what was recorded is recorded anew."""
        self.chunks += chunks
        self._last_use += [0] * len(chunks)
        for chunk in chunks:
            self._note_address(chunk)
        self.record = self._cursor = self._sizes = None
        self._room_at.clear()
        self.reduction.add(chunks)

    # Placement.

    def needed_tier(self) -> Tier:
        """Returns the offload tier, which is made when it is asked for first."""
        if self.tier is None:
            self.tier = self._make_tier()
        return self.tier

    def sizes(self) -> list[ChunkBytes]:
        """Returns what each chunk takes, as it was when `choose_homes` was called last."""
        if self._sizes is None:
            self._sizes = [self._size_of(chunk) for chunk in self.chunks]
        return self._sizes

    def _size_of(self, chunk: Chunk) -> ChunkBytes:
        return ChunkBytes(
            payload=chunk.layout.num_bytes,
            weights=chunk.weights.num_bytes,
            gradients=chunk.sums.num_bytes if chunk.layout.trains else 0,
            states=self.state_bytes(chunk),
        )

    def choose_homes(self) -> Homes:
        """Returns what the placement says about where pieces are kept now. Collective: an error is raised on all ranks.

        Raises:
            ConfigError: The budget is too small.
        """
        self._sizes, found = None, self.homes
        self._room_at.clear()
        failure: ConfigError | None = None
        try:
            found = self._placement.homes(self.sizes(), self.record)
        except ConfigError as error:  # raised by all ranks below
            failure = error
        raise_on_all_ranks(failure, self._agreement_group)
        return found

    def sums_tier(self, chunk: Chunk) -> Tier | None:
        """Returns where the sums of a chunk's gradients go; None: into memory."""
        return self.tier if chunk.index in self.homes.weights else None

    @property
    def bytes_in_memory(self) -> int:
        """Bytes that chunks take in the compute tier, buffers included, masters and states not."""
        return self.pool.bytes_held + sum(chunk.bytes_in_memory for chunk in self.chunks)

    # Iterations.

    def begin_forward(self, *, trains: bool) -> None:
        """Called when the outermost module starts.

        Args:
            trains: A backward will follow.
        """
        self._current = ()
        if self.record is None:
            if trains and not self._tracer.is_recording:
                self._tracer.begin()
        elif not self._awaits_backward:
            self._restart_cursor()
        self._awaits_backward = trains

    def end_forward(self, *, trains: bool) -> None:
        """Called when the outermost module has ended: takes part in what other ranks still need. Collective."""
        if self.is_whole:  # all weights are here, and what this rank computes is its own affair
            return
        self.close()
        if not trains:
            self.release_all()

    def end_backward(self) -> None:
        """Called when autograd has ended: reduces what is left, and lets go of all weights. Collective."""
        self.close()
        self.reduction.finish_backward()
        self.release_all()
        if self._tracer.is_recording:
            self.record = self._tracer.finish()
            self._room_at.clear()
            self._cursor = Cursor(self.record)
            self.on_record()
        self._begin_anew()

    def give_up_forward(self) -> None:
        """Called when the outermost module has failed: what was recorded of it is forgotten."""
        self._tracer = Tracer()
        self._begin_anew()

    def give_up_backward(self) -> None:
        """Called when autograd has failed."""
        self._tracer = Tracer()
        self._begin_anew()
        self.reduction.give_up()

    def _begin_anew(self) -> None:
        """Makes ready for the next iteration."""
        self.phase = Phase.FORWARD
        self._current = ()
        self._awaits_backward = False
        self._restart_cursor()

    def _restart_cursor(self) -> None:
        if self._cursor is not None:
            self._cursor.restart()

    def close(self) -> None:
        """Meets until every rank has come to the end of its phase."""
        while True:
            posts = self.meet((), is_closing=True)
            if all(post.is_closing for post in posts):
                break
        if self.phase is Phase.BACKWARD:
            self.reduction.reduce_leftovers(posts)

    def release_all(self) -> None:
        """Releases every chunk that is not kept, and frees the buffers."""
        for chunk in list(self._gathered.values()):
            if chunk.is_on_its_way:
                chunk.finish_gather()
            if chunk.can_be_released:
                self.release(chunk)
        self.pool.trim()

    # Weights.

    def need(self, slots: Sequence[Slot]) -> None:
        """Makes the weights of some parameters be here. Collective where some are not; see Note [Meetings]."""
        chunks = {slot.chunk.index: slot.chunk for slot in slots}
        self._note_use(tuple(chunks))
        for chunk in chunks.values():
            if chunk.is_on_its_way:
                chunk.finish_gather()
        missing = _missing(slots)
        before, self._protected = self._protected, self._protected | frozenset(chunks)
        try:
            while missing:
                self.meet(self._with_prefetch(missing))
                for index in missing:
                    if self.chunks[index].is_on_its_way:
                        self.chunks[index].finish_gather()
                missing = _missing(slots)
            self._prefetch()
        finally:
            self._protected = before

    def meet(self, wants: Sequence[int], *, is_closing: bool = False) -> list[Post]:
        """Meets the other ranks, and does what follows from it. Collective; see Note [Meetings]."""
        reduction = self.reduction
        wants = tuple(wants[: self.meeting.max_wants])
        posts = self.meeting.hold(
            Post(
                phase=self.phase,
                wants=wants,
                num_ready=reduction.num_ready,
                is_closing=is_closing,
                has_leftovers=is_closing and reduction.has_leftovers,
            )
        )
        reduction.start_agreed(min(post.num_ready for post in posts))
        for index in dict.fromkeys(chain.from_iterable(post.wants for post in posts)):
            self._gather(self.chunks[index], is_own_wish=index in wants)
        return posts

    def _gather(self, chunk: Chunk, *, is_own_wish: bool) -> None:
        if chunk.is_on_its_way:  # another rank had none of it yet, or lost it
            chunk.finish_gather()
        if chunk.has_all_weights:
            chunk.start_gather(None, self.take_buffer)
            chunk.finish_gather()
            return
        unused = chunk.start_gather(self.take_buffer(chunk.layout.num_bytes), self.take_buffer)
        if unused is not None:
            self.pool.give_back(unused)
        self._note_address(chunk)
        self._gathered[chunk.index] = chunk
        if not is_own_wish:
            chunk.finish_gather()
            if chunk.can_be_released:
                self.release(chunk)

    def _with_prefetch(self, missing: Sequence[int]) -> list[int]:
        return [*missing, *self._ahead(skip=missing)]

    def _prefetch(self) -> None:
        """Has chunks gathered that are needed soon, if there is room."""
        ahead = self._ahead(skip=())
        if ahead:
            self.meet(ahead)

    def _ahead(self, skip: Sequence[int]) -> list[int]:
        if self._is_aside or self.is_whole or self._max_prefetch == 0 or self.record is None or self._cursor is None:
            return []
        upcoming = self.record.upcoming(self._cursor.now + 1, self._max_prefetch, ())
        found: list[int] = []
        taken = self.pool.bytes_in_use - self._bytes_unneeded()
        free = self._room() - taken - sum(self.chunks[index].layout.num_bytes for index in skip)
        for index in upcoming:
            chunk = self.chunks[index]
            if chunk.payload is not None or index in skip or index in found:
                continue
            if chunk.layout.num_bytes > free:
                break
            free -= chunk.layout.num_bytes
            found.append(index)
        return found

    def release(self, chunk: Chunk) -> None:
        """Lets go of a chunk's weights."""
        buffer = chunk.release()
        self._gathered.pop(chunk.index, None)
        if buffer is not None:
            self.pool.give_back(buffer)

    # Room.

    def take_buffer(self, num_bytes: int) -> Buffer:
        """Returns a buffer, for which room is made; see Note [Room]."""
        room = self._room()
        self._evict(num_bytes, room, only_unneeded=True)
        while self.pool.bytes_in_use + num_bytes > room and self.reduction.finish_oldest():
            pass
        self._evict(num_bytes, room, only_unneeded=False)
        return self.pool.take(num_bytes)

    def _room(self) -> int:
        now = 0 if self._cursor is None else self._cursor.now
        if now not in self._room_at:
            self._room_at[now] = self._placement.room(self.sizes(), self.homes, self.record, now)
        return self._room_at[now]

    def _evict(self, num_bytes: int, room: int, *, only_unneeded: bool) -> None:
        surplus = self.pool.bytes_in_use + num_bytes - room
        if surplus <= 0:
            return
        candidates = self._unneeded() if only_unneeded else self._releasable()
        sizes = {chunk.index: chunk.layout.num_bytes for chunk in candidates}
        for index in evictions(sizes, self._next_use, surplus):
            if self.pool.bytes_in_use + num_bytes <= room:
                break
            self.release(self.chunks[index])

    def _releasable(self) -> list[Chunk]:
        gathered = self._gathered.values()
        return [chunk for chunk in gathered if chunk.can_be_released and chunk.index not in self._protected]

    def _unneeded(self) -> list[Chunk]:
        """Returns the gathered chunks that this iteration needs no more, as far as the record tells."""
        if self.record is None or self._cursor is None:
            return []
        end = len(self.record.moments)
        uses = ((chunk, self._next_use(chunk.index)) for chunk in self._releasable())
        return [chunk for chunk, next_use in uses if next_use is None or next_use >= end]

    def _bytes_unneeded(self) -> int:
        return sum(chunk.layout.num_bytes for chunk in self._unneeded())

    def _next_use(self, index: int) -> int | None:
        if self.record is not None and self._cursor is not None:
            return self.record.next_use(index, self._cursor.now + 1)
        # No record: in a forward the least recently used comes last again; a backward goes the other way.
        return self._clock - self._last_use[index]

    def is_needed_again(self, chunk: Chunk) -> bool:
        """Whether this iteration will use a chunk's weights once more, as far as the record tells."""
        if self.record is None or self._cursor is None:
            return any(slot.num_saved > 0 for slot in chunk.slots)
        next_use = self.record.next_use(chunk.index, self._cursor.now + 1)
        return next_use is not None and next_use < len(self.record.moments)

    # What happens.

    def chunk_at(self, address: int) -> Chunk | None:
        """Returns the chunk whose payload begins at an address in memory; None: there is no chunk's."""
        chunk = self._chunk_at.get(address)
        is_there = chunk is not None and chunk.payload is not None and chunk.payload.data_ptr() == address
        return chunk if is_there else None

    def note_use(self, chunk: Chunk) -> None:
        """Has the record follow that the weights of a chunk, which are here, are used."""
        self._note_use((chunk.index,))
        before, self._protected = self._protected, self._protected | {chunk.index}
        try:
            self._prefetch()
        finally:
            self._protected = before

    def _note_address(self, chunk: Chunk) -> None:
        if chunk.payload is not None:
            self._chunk_at[chunk.payload.data_ptr()] = chunk

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Surrounds what needs weights outside of training: it is not recorded, and nothing is prefetched for it."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
        self.end_forward(trains=False)

    def _note_use(self, indices: tuple[int, ...]) -> None:
        if self._is_aside or self.is_whole or indices == self._current:
            return
        self._current = indices
        self._clock += 1
        for index in indices:
            self._last_use[index] = self._clock
        is_backward = self.phase is Phase.BACKWARD
        if self._tracer.is_recording:
            self._tracer.note_use(indices, is_backward, self.bytes_in_memory)
        elif self._cursor is not None:
            self._cursor.advance(indices, is_backward)

    def note_other_bytes(self) -> None:
        """Has the record take note of memory that is not of chunks."""
        if self._tracer.is_recording:
            self._tracer.note_other_bytes(self.other_bytes())

    def note_complete(self, chunk: Chunk) -> None:
        """Has the record take note that a chunk's gradients are complete."""
        if self._tracer.is_recording:
            self._tracer.note_complete(chunk.index)

    @property
    def is_recording(self) -> bool:
        """Whether this is the iteration that the record is made of."""
        return self._tracer.is_recording


def _nothing() -> None:
    """Does nothing: there is no optimizer."""


def adam_state_bytes(chunk: Chunk) -> int:
    """Returns what Adam keeps of a chunk on this rank, masters of low-precision weights included: an estimate."""
    if not chunk.layout.trains:
        return 0
    return chunk.layout.piece_numel * (8 if chunk.layout.dtype.itemsize == 4 else 12)


def _missing(slots: Iterable[Slot]) -> list[int]:
    """Returns the chunks that have to be gathered for these parameters, each once."""
    return list(dict.fromkeys(slot.chunk.index for slot in slots if not slot.chunk.is_gathered or slot.is_overwritten))
