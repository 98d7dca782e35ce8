"""Shared-memory transport for collectives of CPU tensors in groups whose ranks all run on one host.

`BOOSTER_SHARED_MEMORY=off` or `use_shared_memory(False)` leave all collectives to the group's backend.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from booster.errors import ConfigError
from booster.fault_tolerance.collective_errors import abort_callbacks
from booster.fault_tolerance.heartbeat import host_id
from booster.fault_tolerance.timeouts import timeout_callbacks
from booster.kernels.shared_memory import MAX_RANKS, SharedMemory, SharedMemoryHandle, is_available
from booster.logger import get_dist_logger

from .fake import FakeSharedMemory, is_fake_world

# Note [Choosing a transport]
# A group chooses once, at its first collective of CPU tensors in this package. One small all-gather of the backend
# exchanges, per rank, whether shared memory is enabled and its kernel available, the host and the process-id namespace,
# and from rank 0 the address of the memory that it created. If all match, the other ranks attach to it, and a second
# all-gather exchanges whether all succeeded. Otherwise all ranks use the group's backend. Every rank takes part
# whatever its setting, so settings may differ.

# Note [Pending work]
# Shared memory moves nothing by itself: a rank has to copy. So a started operation is only queued, and runs when
# something waits for it; but the first of a group's queue publishes what fits into the memory, so that others wait less
# for a rank that computes meanwhile. All ranks must run the same operations in the same order, though they may wait in
# different orders: ranks that use different modules of a model do. So a wait first runs everything that its thread has
# started before, on any group. So does a wait for anything else in this package: another rank may need this rank's
# pending work to reach the point that this rank waits for.

VARIABLE = "BOOSTER_SHARED_MEMORY"
_SETTINGS = {"": True, "on": True, "auto": True, "1": True, "off": False, "0": False}
_DEFAULT_TIMEOUT = timedelta(minutes=30)

# is it enabled, host, user; process id, file, key, bytes per rank
_RECORD = struct.Struct("<?32sQqqQQ")
_NO_FILE = -1

# torch 2.13 renamed it and warns at each call of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class GroupMemory:
    """Shared memory of a group, and the queue of this rank's pending work in it.

    Attributes:
        memory: This rank's mapping.
        lock: Lock that is held while an operation runs.
        pending: Operations that are started and have not run yet, see Note [Pending work].
    """

    memory: SharedMemory
    lock: threading.RLock = field(default_factory=threading.RLock)
    pending: deque[PendingWork] = field(default_factory=deque)


class _ThreadPending(threading.local):
    def __init__(self) -> None:
        self.operations: deque[PendingWork] = deque()


_pending = _ThreadPending()


class PendingWork:
    """Queued operation.

    Args:
        queue: Memory of the group, with its queue.
        error_context: Context in which the work runs: translates its errors.
        function: Implementation, called once, and again if it raised. After an error of shared memory every later call
            fails.
        publish: Function that lets the other ranks have a part of this rank's data; optional, called at most once, when
            the operation is the first one in the queue.

    Attributes:
        lock: Lock that is held while it runs.
        is_done: Whether it has run.
    """

    def __init__(
        self,
        queue: GroupMemory,
        error_context: Callable[[], AbstractContextManager[None]],
        function: Callable[[], None],
        publish: Callable[[], None] | None = None,
    ) -> None:
        self._queue = queue
        self.lock = queue.lock
        self.is_done = False
        self._error_context = error_context
        self._function: Callable[[], None] | None = function
        self._publish_function = publish
        self._is_queued = True
        with self.lock:
            queue.pending.append(self)
            _pending.operations.append(self)
            if queue.pending[0] is self:
                self._publish()

    def wait(self) -> None:
        """Run everything that was started before it, and then itself; return at once if it has run."""
        if not self.is_done:
            flush_pending(self)
            self._run_in_order()

    def _run_in_order(self) -> None:
        with self.lock:
            while self._is_queued:
                self._queue.pending.popleft()._run()
            if not self.is_done:
                self._run()  # it has failed, and fails again
            if self._queue.pending:
                self._queue.pending[0]._publish()

    def _publish(self) -> None:
        if self._publish_function is not None:
            self._publish_function()
            self._publish_function = None

    def _run(self) -> None:
        self._is_queued = False
        if self._function is not None:
            with self._error_context():
                self._function()
            self._function = self._publish_function = None  # frees its tensors
            self.is_done = True


def flush_pending(last: PendingWork | None = None) -> None:
    """Run this thread's pending work, up to an operation, by default all."""
    pending = _pending.operations
    while pending and (last is None or not last.is_done):
        pending.popleft()._run_in_order()


_is_enabled: bool | None = None  # None: by the environment variable
_is_enabled_in: WeakKeyDictionary[dist.ProcessGroup, bool | None] = WeakKeyDictionary()  # overrides it
_choices: WeakKeyDictionary[dist.ProcessGroup, GroupMemory | None] = WeakKeyDictionary()


def use_shared_memory(enabled: bool | None, only_in: dist.ProcessGroup | None = None) -> None:
    """Switch shared memory on or off from the next collective on, also for groups that have chosen already.

    Args:
        enabled: If True, use shared memory. None restores the environment variable `BOOSTER_SHARED_MEMORY`, which is on
            unless it is `off`.
        only_in: Group to which it applies, overriding the value for all groups; optional, defaults to all groups.

    Called on every rank at the same place; if the ranks' values differ, it is off for all. No communication.
    """
    global _is_enabled
    if only_in is None:
        _is_enabled = enabled
        _choices.clear()
    else:
        _is_enabled_in[only_in] = enabled
        _choices.pop(only_in, None)


def transport(group: dist.ProcessGroup | None = None) -> str:
    """Return the transport of collectives of CPU tensors: "shared memory", or the name of the group's backend.

    Collective: every rank of the group must call it, as the group may have to choose now.
    """
    chosen = group or _get_default_group()
    if dist.get_world_size(chosen) > 1 and memory_of(chosen, torch.empty(0)) is not None:
        return "shared memory"
    return str(dist.get_backend(chosen))


def memory_of(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> GroupMemory | None:
    """Return the shared memory for a collective of this tensor, or None if the group's backend is used.

    Args:
        group: Process group of several ranks, None for the world.
        tensor: Tensor on the same device type on all ranks.

    Collective at the group's first call with a CPU tensor; see Note [Choosing a transport].

    Raises:
        ConfigError: `BOOSTER_SHARED_MEMORY` has an unknown value.
        RuntimeError: Error of the backend, where a rank is lost or too late.
    """
    if is_fake_world():
        return GroupMemory(FakeSharedMemory())  # type: ignore[arg-type]  # has the used methods
    if tensor.device.type != "cpu":
        return None
    chosen = group or _get_default_group()
    if chosen not in _choices:  # not try/except, so that an error of the choice has no KeyError as its context
        flush_pending()  # the backend does not run pending work that other ranks may wait for
        _choices[chosen] = _choose(chosen)
    return _choices[chosen]


def abort_shared_memory(group: dist.ProcessGroup) -> None:
    """Make all collectives of the group through shared memory fail, on all ranks. No communication."""
    choice = _choices.get(group)
    if choice is not None:
        choice.memory.abort()


abort_callbacks.append(abort_shared_memory)


def release_shared_memory(group: dist.ProcessGroup) -> None:
    """Unmap the group's shared memory on this rank; none of its collectives is in flight. No communication."""
    _choices.pop(group, None)


def _set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    choice = _choices.get(group)
    if choice is not None:
        choice.memory.set_timeout(seconds)


timeout_callbacks.append(_set_timeout)


def _choose(group: dist.ProcessGroup) -> GroupMemory | None:
    size = dist.get_world_size(group)
    if "gloo" not in str(dist.get_backend(group)) or size > MAX_RANKS:
        return None
    memory, record = _create(group, size)
    records = _all_gather_bytes(record, group)
    fields = [_RECORD.unpack(one) for one in records]
    is_wanted_by_all = all(one[0] for one in fields)
    is_one_host = len({one[1:3] for one in fields}) == 1
    if not (is_wanted_by_all and is_one_host and fields[0][4] != _NO_FILE):
        return None
    if memory is None:
        try:
            ticket = SharedMemoryHandle(*fields[0][3:])
            memory = SharedMemory.attach(ticket, size, dist.get_rank(group), _timeout_seconds(group))
        except RuntimeError as error:
            _warn(str(error))
    if not all(any(answer) for answer in _all_gather_bytes(bytes([memory is not None]), group)) or memory is None:
        return None
    memory.enable()
    return GroupMemory(memory)


def _create(group: dist.ProcessGroup, size: int) -> tuple[SharedMemory | None, bytes]:
    """Return the memory (on rank 0, if it could be created) and this rank's record for the other ranks."""
    setting = os.environ.get(VARIABLE, "").lower()
    if setting not in _SETTINGS:
        raise ConfigError(f"{VARIABLE}={setting!r} is unknown: set it to on or off, or unset it")
    explicit = _is_enabled_in.get(group, _is_enabled)
    is_wanted = _SETTINGS[setting] if explicit is None else explicit
    if not (is_wanted and sys.platform == "linux" and is_available()):
        return None, bytes(_RECORD.size)
    memory, ticket = None, SharedMemoryHandle(os.getpid(), _NO_FILE, 0, 0)
    if dist.get_rank(group) == 0:
        try:
            memory, ticket = SharedMemory.create(size, _timeout_seconds(group))
        except RuntimeError as error:
            _warn(str(error))
    address = ticket.process_id, ticket.file_number, ticket.key, ticket.slot_bytes
    # Processes of one host and user can open each other's memory.
    return memory, _RECORD.pack(True, hashlib.sha256(host_id().encode()).digest(), os.geteuid(), *address)


def _all_gather_bytes(local: bytes, group: dist.ProcessGroup) -> list[bytes]:
    source = torch.frombuffer(bytearray(local), dtype=torch.uint8)
    joined = source.new_empty(dist.get_world_size(group) * len(local))
    all_gather_single(joined, source, group=group)
    return [bytes(row.numpy()) for row in joined.view(-1, len(local))]


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group's backend, which torch keeps in the backend's options only."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
    return timeout.total_seconds()


_reasons: set[str] = set()


def _warn(reason: str) -> None:
    if reason not in _reasons:
        _reasons.add(reason)
        get_dist_logger().warning(
            f"ranks on this host communicate through gloo, several times slower than through shared memory: {reason}."
            f" {VARIABLE}=off silences this warning"
        )
