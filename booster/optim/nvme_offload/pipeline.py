"""Chunks pass from the disk through a few buffers and back, while the next are read and the last are written."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from booster.kernels.disk_io import DiskQueue, Ticket, aligned_buffer

from .state_file import Planes, StateFile


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Have a SIGINT that comes inside take effect at the end; for a few milliseconds at most.

    Python only ever handles signals in the main thread, so that nothing is to be done in others.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


ChunkPlace = tuple[StateFile, int]  # a chunk by its number

# One chunk is computed while others are read and written. More would hide more jitter of the disk, and cost
# 2 * CHUNK_BYTES of memory each.
NUM_BUFFERS = 3
_NUM_THREADS = 4  # where the queue has threads: two planes being read and two being written


def new_buffers(num_bytes: int) -> list[Planes]:
    """Return memory for the chunks on their way.

    Args:
        num_bytes: Of the largest chunk.
    """
    return [(aligned_buffer(num_bytes), aligned_buffer(num_bytes)) for _ in range(NUM_BUFFERS)]


@dataclass(slots=True, eq=False)
class _Transfer:
    """A chunk in a buffer."""

    place: ChunkPlace
    buffer: Planes
    tickets: list[Ticket] = field(default_factory=list)

    @property
    def planes(self) -> Planes:
        """The part of the buffer that the chunk fills."""
        file, number = self.place
        num_bytes = file.layout.chunks[number].num_bytes
        return self.buffer[0][:num_bytes], self.buffer[1][:num_bytes]

    def is_done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> OSError | None:
        """Wait for both planes, also if the first fails: nothing may use the buffer while one is in flight.

        Returns:
            The first failure.
        """
        failure = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except OSError as error:
                failure = failure or error
        return failure


class Pipeline:
    """Brings chunks through memory, in order.

    Args:
        buffers: Where they are while they are in memory.
        compute: Turns the valid states of a chunk, in a buffer, into the new ones.
        idle: Does some other work, and returns False when there is none left; called while a read is awaited.
    """

    def __init__(
        self, buffers: list[Planes], compute: Callable[[ChunkPlace, Planes], None], idle: Callable[[], bool]
    ) -> None:
        self._free = list(buffers)
        self._compute = compute
        self._idle = idle
        self._reading: deque[_Transfer] = deque()
        self._writing: deque[_Transfer] = deque()

    def run(self, todo: deque[ChunkPlace]) -> None:
        """Compute the chunks and take them out of `todo` one by one, as each is computed.

        Raises:
            OSError: A chunk could not be read, and stays in `todo` with those after it; or one could not be written,
                and its new states are in memory.
        """
        with DiskQueue(_NUM_THREADS) as queue:
            try:
                while todo or self._writing:
                    self._advance(queue, todo)
            finally:
                self._drain()

    def _advance(self, queue: DiskQueue, todo: deque[ChunkPlace]) -> None:
        while self._writing and self._writing[0].is_done():
            self._finish_write()
        while self._free and len(self._reading) < len(todo):
            self._start_read(queue, todo[len(self._reading)])
        if not self._reading:
            if self._writing:
                self._finish_write()
            return
        transfer = self._reading[0]
        while not transfer.is_done() and self._idle():
            pass
        failure = transfer.wait()
        if failure is not None:
            raise failure
        with interrupts_later():  # between the new parameters and their states
            self._compute(transfer.place, transfer.planes)
            todo.popleft()
            self._start_write(queue, self._reading.popleft())

    def _start_write(self, queue: DiskQueue, transfer: _Transfer) -> None:
        file, number = transfer.place
        try:
            transfer.tickets = file.write(queue, number, transfer.planes)
        except BaseException:
            file.keep(number, transfer.planes)
            self._free.append(transfer.buffer)
            raise
        self._writing.append(transfer)

    def _start_read(self, queue: DiskQueue, place: ChunkPlace) -> None:
        transfer = _Transfer(place, self._free.pop())
        self._reading.append(transfer)
        file, number = place
        transfer.tickets = file.read(queue, number, transfer.planes)

    def _finish_write(self) -> None:
        transfer = self._writing[0]
        failure = transfer.wait()
        with interrupts_later():
            file, number = transfer.place
            if failure is None:
                file.commit(number)
            else:
                file.keep(number, transfer.planes)
            self._free.append(self._writing.popleft().buffer)
        if failure is not None:
            raise failure

    def _drain(self) -> None:
        """End what is in flight after a failure, which is the one that is raised. What is being read is given up."""
        with interrupts_later():
            while self._reading:
                transfer = self._reading.popleft()
                transfer.wait()
                self._free.append(transfer.buffer)
            while self._writing:
                with suppress(OSError):  # its states were kept
                    self._finish_write()
