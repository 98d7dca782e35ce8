"""Pipelined read, update and write of state chunks through a few buffers."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from booster.kernels.disk_io import DiskQueue, IOTicket

from .state_file import StateBlocks, StateFile


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer a SIGINT that arrives in the block to its end, which should be a few milliseconds away.

    Python handles signals in the main thread only, so this is a no-op in other threads.
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


ChunkRef = tuple[StateFile, int]  # file and chunk index

# One chunk is computed while others are read and written. More buffers would hide more latency jitter of the disk, and
# cost 2 * CHUNK_BYTES of memory each.
NUM_BUFFERS = 3
_NUM_THREADS = 4  # two planes being read and two being written


@dataclass(slots=True, eq=False)
class _Transfer:
    """Read or write of a chunk that is in a buffer."""

    chunk: ChunkRef
    buffer: StateBlocks
    tickets: list[IOTicket] = field(default_factory=list)

    @property
    def blocks(self) -> StateBlocks:
        """Views of the buffer with the size of the chunk."""
        file, index = self.chunk
        num_bytes = file.layout.chunks[index].num_bytes
        return self.buffer[0][:num_bytes], self.buffer[1][:num_bytes]

    def is_done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> OSError | None:
        """Wait for both planes, even if the first fails, as the buffer can't be reused while I/O is in flight.

        Returns:
            First failure, or None.
        """
        failure = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except OSError as error:
                failure = failure or error
        return failure


class Pipeline:
    """Processes chunks in order, overlapping computation with disk I/O.

    Args:
        buffers: `NUM_BUFFERS` buffers, each as large as the largest chunk.
        compute: Function that updates the states of a chunk in its buffer.
        idle: Function that does other work while a read is in flight; it returns False when none is left.
    """

    def __init__(
        self, buffers: list[StateBlocks], compute: Callable[[ChunkRef, StateBlocks], None], idle: Callable[[], bool]
    ) -> None:
        self._free = list(buffers)
        self._compute = compute
        self._idle = idle
        self._reading: deque[_Transfer] = deque()
        self._writing: deque[_Transfer] = deque()

    def run(self, todo: deque[ChunkRef]) -> None:
        """Process the chunks, and remove each from `todo` when it is computed.

        Raises:
            OSError: A chunk could not be read, and stays in `todo` with the following ones; or one could not be
                written, and its new states stay in memory.
        """
        with DiskQueue(_NUM_THREADS) as queue:
            try:
                while todo or self._writing:
                    self._advance(queue, todo)
            finally:
                self._drain()

    def _advance(self, queue: DiskQueue, todo: deque[ChunkRef]) -> None:
        while self._writing and self._writing[0].is_done():
            self._finish_write()
        while self._free and len(self._reading) < len(todo):
            chunk = todo[len(self._reading)]
            started = _Transfer(chunk, self._free.pop())
            self._reading.append(started)
            file, index = chunk
            started.tickets = file.read(queue, index, started.blocks)
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
        with defer_sigint():  # so that parameters and their states stay consistent
            self._compute(transfer.chunk, transfer.blocks)
            todo.popleft()
            self._start_write(queue, self._reading.popleft())

    def _start_write(self, queue: DiskQueue, transfer: _Transfer) -> None:
        file, index = transfer.chunk
        try:
            transfer.tickets = file.write(queue, index, transfer.blocks)
        except BaseException:
            file.keep_in_memory(index, transfer.blocks)
            self._free.append(transfer.buffer)
            raise
        self._writing.append(transfer)

    def _finish_write(self) -> None:
        transfer = self._writing[0]
        failure = transfer.wait()
        with defer_sigint():
            file, index = transfer.chunk
            if failure is None:
                file.commit(index)
            else:
                file.keep_in_memory(index, transfer.blocks)
            self._free.append(self._writing.popleft().buffer)
        if failure is not None:
            raise failure

    def _drain(self) -> None:
        """Wait for all I/O in flight; discard reads, and keep states that could not be written in memory."""
        with defer_sigint():
            while self._reading:
                transfer = self._reading.popleft()
                transfer.wait()
                self._free.append(transfer.buffer)
            while self._writing:
                with suppress(OSError):  # `_finish_write` kept the states in memory
                    self._finish_write()
