"""One collective or message: tag, byte count, fault injection, readable errors.

Every wait raises `RankFailedError` if a rank is lost or too late; the message names it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from booster.fault_tolerance.collective_errors import translate_errors
from booster.fault_tolerance.failure_diagnosis import CollectiveId
from booster.fault_tolerance.fault_injection import maybe_inject_fault
from booster.fault_tolerance.progress import Phase
from booster.fault_tolerance.timeouts import p2p_timeout
from booster.kernels.shared_memory import SharedMemory

from .process_groups import check_not_released
from .shared_memory import GroupMemory, PendingWork, flush_pending, memory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCount:
    """Calls and bytes of this rank, by operation name.

    Point-to-point messages, and collectives made of them (on the CPU reduce_scatter and all_gather), count the bytes of
    their payloads. Others count the theoretical volume of a rank: an all_reduce 2(P-1)/P of the tensor each way; a
    broadcast the tensor, once from its source and once to every other rank.

    Attributes:
        calls: Number of operations; 0 in groups of one rank, which communicate nothing.
        sent: Bytes sent by this rank.
        received: Bytes received by this rank.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def on_start(self, operation: CollectiveOp, sent: int, received: int) -> None:
        with _observers_lock:
            self.calls[operation.name] += 1
            self.sent[operation.name] += sent
            self.received[operation.name] += received

    def on_end(self, operation: CollectiveOp) -> None:
        pass


@contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Count the communication of all threads of this process through this package in the block.

    Blocks may be nested; each counts everything inside of it. No communication.
    """
    count = CommunicationCount()
    with observe_communication(count):
        yield count


def record_received(num_bytes: int) -> None:
    """Count the bytes of a message that is being received, whose size was unknown at its start."""
    for observer in _observers:
        if isinstance(observer, CommunicationCount):
            with _observers_lock:
                observer.received["receive"] += num_bytes


class CommunicationObserver(Protocol):
    """Callbacks of `observe_communication`, in the thread of the operation."""

    def on_start(self, operation: CollectiveOp, sent: int, received: int) -> None:
        """An operation starts, with the bytes that `CommunicationCount` counts."""

    def on_end(self, operation: CollectiveOp) -> None:
        """This rank has waited for the operation, or has run it itself."""


# An immutable tuple, replaced as a whole: other threads read the old one or the new one.
_observers: tuple[CommunicationObserver, ...] = ()
_observers_lock = threading.Lock()


@contextmanager
def observe_communication(observer: CommunicationObserver) -> Iterator[None]:
    """Notify the observer of the start and the end of each operation in the block. No communication."""
    global _observers
    with _observers_lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _observers_lock:
            _observers = tuple(other for other in _observers if other is not observer)


# Tags of messages, equal on both ends: a collective's number is the same on all ranks, and the third send to a rank
# matches the third receive there.
_FIRST_TAG = 2**24  # lower tags are left to users of torch's point-to-point calls
_TAGS_PER_KIND = 2**27  # tags per kind before they repeat; a tag has 31 bits
_TAG_KINDS = {"reduce_scatter": 0, "all_gather": 1, "send": 2, "receive": 2}
_HEADER_KIND = 3
_SMALL_KINDS = {"all_reduce": 4, "broadcast": 5, "all_gather": 6}
_SMALL_SIZES = 2**16 + 1

_MAX_SMALL_BYTES = 64 * 2**10  # of a small collective, see Note [Small collectives]

_numbers: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, int | None]]] = WeakKeyDictionary()
_numbers_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """Collective or message that has started on this rank.

    Attributes:
        name: Name of the operation, one of `fault_injection.OPERATIONS`.
        group: Process group, None for the world.
        number: Sequence number among this rank's operations of that name in the group (and with that peer), from 1.
        peer: Global rank of the other end of a message, None for collectives.
    """

    name: str
    group: dist.ProcessGroup | None
    number: int
    peer: int | None = None

    @property
    def tag(self) -> int:
        """Tag of its messages, unique among the operations in flight."""
        return _tag(_TAG_KINDS[self.name], self.number)

    @property
    def header_tag(self) -> int:
        """Tag of the header message of a tensor."""
        return _tag(_HEADER_KIND, self.number)

    def small_tag(self, nbytes: int) -> int:
        """Return the tag of its messages of `nbytes` bytes, which differs from that of another length."""
        return _tag(_SMALL_KINDS[self.name], self.number * _SMALL_SIZES + nbytes)

    def send_to(self, tensor: torch.Tensor, receiver: int, tag: int) -> dist.Work:
        """Start a message to a rank of the group from a contiguous tensor, which must outlive it."""
        with self.translate_errors():
            peer = dist.get_global_rank(self.group or _get_default_group(), receiver)
            return _check_in_group(dist.isend(tensor, dst=peer, group=self.group, tag=tag))

    def receive_from(self, tensor: torch.Tensor, sender: int, tag: int) -> dist.Work:
        """Start receiving a message from a rank of the group into a contiguous tensor of its length."""
        with self.translate_errors():
            peer = dist.get_global_rank(self.group or _get_default_group(), sender)
            return _check_in_group(dist.irecv(tensor, src=peer, group=self.group, tag=tag))

    def wait(self, work: dist.Work) -> None:
        """Wait for one `Work` of the operation, at most for the group's timeout."""
        with self.waiting():
            limit = p2p_timeout(self.group)
            work.wait() if limit is None else work.wait(limit)

    def memory_for(self, tensor: torch.Tensor) -> GroupMemory | None:
        """Return the shared memory for this collective, or None if the group's backend is used."""
        with self.translate_errors():
            return memory_of(self.group, tensor)

    def run(
        self,
        tensor: torch.Tensor,
        *,
        in_memory: Callable[[SharedMemory], None],
        by_backend: Callable[[], object],
        by_messages: Callable[[], None] | None = None,
    ) -> None:
        """Run a collective of this tensor and wait for it.

        Args:
            tensor: Tensor that is sent or received.
            in_memory: Implementation through the group's shared memory.
            by_backend: Implementation for groups without shared memory.
            by_messages: Implementation by point-to-point messages, optional; used for small tensors over gloo, see Note
                [Small collectives].
        """
        group_memory = self.memory_for(tensor)
        if group_memory is not None:
            flush_pending()  # first: if it fails, this operation has not started
            PendingWork(group_memory, self.ending, lambda: in_memory(group_memory.memory)).wait()
            return
        with self.waiting():
            if (
                by_messages is not None
                and tensor.nbytes <= _MAX_SMALL_BYTES
                and (tensor.device.type == "cpu" and "gloo" in str(dist.get_backend(self.group)))
                # In this mode torch compares all calls itself, and counts messages: a broadcast's differ between ranks.
                and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
            ):
                by_messages()
            else:
                by_backend()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other ranks outside of shared memory; runs pending work in it first."""
        flush_pending()
        with self.ending():
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context of the wait that ends the operation, or of the work that this rank does for it."""
        with self.translate_errors():
            yield
        for observer in _observers:
            observer.on_end(self)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Context of this operation's calls to its group: errors about lost or late ranks name them.

        The phase is "communication" meanwhile.
        """
        with (
            Phase("communication", self),
            translate_errors(CollectiveId(self.name, self.number, self.peer), self.group),
        ):
            yield


def start_op(
    name: str, group: dist.ProcessGroup | None, *, sent: int = 0, received: int = 0, peer: int | None = None
) -> CollectiveOp:
    """Start an operation on this rank, in a group of several ranks.

    Args:
        name: Name of the operation, one of `fault_injection.OPERATIONS`.
        group: Process group, None for the world.
        sent: Bytes that this rank sends.
        received: Bytes that it receives; of a message of unknown size by `record_received` when it is known.
        peer: Global rank of the other end of a message, None for collectives.

    Raises:
        ConfigError: The group was released.
    """
    check_not_released(group)
    maybe_inject_fault(name)
    with _numbers_lock:
        numbers = _numbers.setdefault(group or _get_default_group(), Counter())
        numbers[name, peer] += 1
        operation = CollectiveOp(name, group, numbers[name, peer], peer)
    for observer in _observers:
        observer.on_start(operation, sent, received)
    return operation


def _check_in_group(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise AssertionError("this rank is not in the group that it communicates in")
    return work


def _tag(kind: int, number: int) -> int:
    return _FIRST_TAG + kind * _TAGS_PER_KIND + number % _TAGS_PER_KIND
