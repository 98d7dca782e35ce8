"""What a disk can do: as many reads and writes as a step has, past the page cache, with nothing computed."""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path

import torch

from booster.kernels.disk_io import DiskQueue, IOTicket, aligned_buffer

__all__ = ["BLOCK_BYTES", "RawFile"]

BLOCK_BYTES = 16 << 20  # of the plain loop
_REQUEST_BYTES = 8 << 20  # of the queue: as the optimizer's
_NUM_REQUESTS = 6  # as many as the optimizer has in flight


# Note [The same blocks]
# The raw variants use the optimizer's own file, so that all variants use the same part of the disk. It has two halves:
# a step reads the one with the valid states and writes the other. The raw variants do the same, and the next step
# overwrites their writes.


class RawFile:
    """The optimizer's file, to be read and written without it; see Note [The same blocks].

    Args:
        path: The file.

    Attributes:
        num_bytes: Of a half, a multiple of `BLOCK_BYTES`.
        is_direct: Whether the page cache is left out.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = path.stat().st_size // 2
        assert self.num_bytes % BLOCK_BYTES == 0, f"{path} has {path.stat().st_size} bytes"
        self._descriptor, self.is_direct = _open(path)
        # Random, as the disk of a virtual machine may be quicker with zeros.
        self._block = aligned_buffer(BLOCK_BYTES).random_(0, 256)
        self._buffers = [aligned_buffer(_REQUEST_BYTES).random_(0, 256) for _ in range(_NUM_REQUESTS)]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def run_loop(self, source: int) -> None:
        """Reads half number `source` from end to end, then writes the other, one block after the other."""
        source, target = self._starts(source)
        block = memoryview(self._block.numpy())
        for offset in range(0, self.num_bytes, BLOCK_BYTES):
            _expect_all(os.preadv(self._descriptor, [block], source + offset))
        for offset in range(0, self.num_bytes, BLOCK_BYTES):
            _expect_all(os.pwrite(self._descriptor, block, target + offset))

    def run_queue(self, queue: DiskQueue, source: int) -> None:
        """Copies half number `source` to the other, with reads and writes in flight at the same time."""
        source, target = self._starts(source)
        free, todo = list(self._buffers), deque(range(0, self.num_bytes, _REQUEST_BYTES))
        reading: deque[tuple[int, torch.Tensor, IOTicket]] = deque()
        writing: deque[tuple[torch.Tensor, IOTicket]] = deque()
        while todo or reading or writing:
            while todo and free:
                offset, buffer = todo.popleft(), free.pop()
                reading.append((offset, buffer, queue.read(self._descriptor, buffer, source + offset)))
            while reading and (reading[0][2].done() or not writing):
                offset, buffer, ticket = reading.popleft()
                ticket.wait()
                writing.append((buffer, queue.write(self._descriptor, buffer, target + offset)))
            buffer, ticket = writing.popleft()
            ticket.wait()
            free.append(buffer)

    def _starts(self, source: int) -> tuple[int, int]:
        return source * self.num_bytes, (1 - source) * self.num_bytes


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR), False


def _expect_all(count: int) -> None:
    if count != BLOCK_BYTES:
        raise OSError(f"{count} bytes of a block of {BLOCK_BYTES} were transferred")
