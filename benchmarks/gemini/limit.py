"""Holds a process to a number of bytes, and tells a process that had too few from one that is broken."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HeldMeter", "confine", "is_memory_group", "lacked_memory", "memory_groups", "release"]

# The file of the limit, and one that forbids to swap what is above it: of version 2, and of version 1.
_VERSION_2 = ("memory.max", "memory.swap.max", "0")
_VERSION_1 = ("memory.limit_in_bytes", "memory.swappiness", "0")
_PROCESSES = "cgroup.procs"
_STATUS = Path("/proc/self/status")
_SECONDS_BETWEEN_LOOKS = 0.02

# What torch, the C++ library, Python, the kernel and the collectives of a rank whose neighbour was killed say.
_MARKERS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "memoryerror",
    "unable to mmap",
    "can't start new thread",
    "resource temporarily unavailable",
    "ended with exit code -",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "rankfailederror",
)


def confine(limit_bytes: int, group: Path | None) -> None:
    """Holds this process to so many bytes from now on.

    Without a group it is RLIMIT_DATA: private writable memory, reserved or used, so that an allocation fails. Shared
    memory is not in it; `HeldMeter` has it.

    Args:
        limit_bytes: Of the process.
        group: Of `memory_groups`, whose limit it is then: what is resident or shared, and cached pages of files, of
            which the kernel frees what it can before it kills; None: no such group.
    """
    if group is None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    else:
        (group / _PROCESSES).write_text(str(os.getpid()))


def release(group: Path | None) -> None:
    """Takes `confine`'s limit off this process; that of a group stays."""
    if group is None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_memory_group(folder: Path) -> bool:
    """Returns True for the folder of a memory cgroup, version 1 or 2, in which this user may make groups."""
    names = (_VERSION_1[0], _VERSION_2[0])
    can_limit = any((folder / name).is_file() for name in names)
    return can_limit and (folder / _PROCESSES).is_file() and os.access(folder, os.W_OK)


@contextmanager
def memory_groups(parent: Path | None, num_ranks: int, limit_bytes: int) -> Iterator[Sequence[Path | None]]:
    """Gives every rank a memory cgroup with this limit while the block runs.

    Args:
        parent: The group to make them in; None: there are none, a rank gets None.
        num_ranks: How many.
        limit_bytes: Of each.
    """
    if parent is None:
        yield [None] * num_ranks
        return
    groups = [parent / f"largest-{os.getpid()}-{rank}" for rank in range(num_ranks)]
    made: list[Path] = []
    try:
        for group in groups:
            group.mkdir()
            made.append(group)
            _limit(group, limit_bytes)
        yield groups
    finally:
        for group in made:
            group.rmdir()


def _limit(group: Path, limit_bytes: int) -> None:
    names = _VERSION_2 if (group / _VERSION_2[0]).is_file() else _VERSION_1
    limit, swap, no_swap = names
    (group / limit).write_text(str(limit_bytes))
    if (group / swap).is_file():
        (group / swap).write_text(no_swap)


class HeldMeter:
    """Watches what this process holds that the kernel can't drop: private and shared memory.

    Pages of mapped files are not in it, as they go back to the file when memory is short; a cgroup makes them go. A
    thread looks every few milliseconds, so that a shorter peak of shared memory may be missed; private memory is under
    RLIMIT_DATA at all times.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HeldMeter:
        """Starts to watch."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends it."""
        self._has_ended.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were held."""
        self._look()
        return self._peak

    def _watch(self) -> None:
        while not self._has_ended.wait(_SECONDS_BETWEEN_LOOKS):
            self._look()

    def _look(self) -> None:
        lines = _STATUS.read_text().splitlines()
        held = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        self._peak = max(self._peak, held * 1024)


def lacked_memory(message: str) -> bool:
    """Returns True if that is what a run says, or leaves, in which a rank got no memory or was killed for it."""
    text = message.lower()
    return any(marker in text for marker in _MARKERS)
