"""One communication from start to end: it is numbered, counted, hit by injected faults, and fails in words."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from booster.comm.counter import record
from booster.comm.faults import strike
from booster.comm.groups import limit_of_messages
from booster.comm.release import require_not_released
from booster.comm.shared_memory import GroupMemory, memory_of
from booster.comm.started import Started, perform_started
from booster.comm.waiting import Place, failures_named
from booster.kernels.shared_memory import SharedMemory
from booster.phases import Phase

__all__ = ["Operation", "begin"]

# Tags of messages. Both ends of one have the same: a collective's number is the same on all ranks, and the third send
# to a rank is for the third receive there.
_FIRST_TAG = 2**24  # below are the tags of those who use torch's point-to-point calls themselves
_TAGS_EACH = 2**27  # before they begin anew; a tag has 31 bits
_TAG_KINDS = {"reduce_scatter": 0, "all_gather": 1, "send": 2, "receive": 2}
_HEADER_KIND = 3
_SMALL_KINDS = {"all_reduce": 4, "broadcast": 5, "all_gather": 6}
_SMALL_SIZES = 2**16 + 1

_numbers: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, int | None]]] = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Operation:
    """A communication that has started on this rank.

    Attributes:
        name: See `OPERATIONS`.
        group: The ranks that take part; None: the world.
        number: How many of that name this rank has started in this group (and with that peer), from 1.
        peer: World rank of the other end of a point-to-point message; None: all ranks of the group take part.
    """

    name: str
    group: dist.ProcessGroup | None
    number: int
    peer: int | None = None

    @property
    def tag(self) -> int:
        """The tag of its messages, which no other operation under way has."""
        return _tag(_TAG_KINDS[self.name], self.number)

    @property
    def header_tag(self) -> int:
        """The tag of the message that goes ahead of a tensor."""
        return _tag(_HEADER_KIND, self.number)

    def tag_of_small(self, nbytes: int) -> int:
        """Returns a tag of its messages, of so many bytes each, that one with messages of another length has not."""
        return _tag(_SMALL_KINDS[self.name], self.number * _SMALL_SIZES + nbytes)

    def send_to(self, tensor: torch.Tensor, receiver: int, tag: int) -> dist.Work:
        """Starts a message to a rank of the group, straight from a contiguous tensor, which has to outlive it."""
        with self.failures_named():
            return _under_way(dist.isend(tensor, dst=_world_rank(receiver, self.group), group=self.group, tag=tag))

    def receive_from(self, tensor: torch.Tensor, sender: int, tag: int) -> dist.Work:
        """Starts to take a message from a rank of the group, straight into a contiguous tensor of its length."""
        with self.failures_named():
            return _under_way(dist.irecv(tensor, src=_world_rank(sender, self.group), group=self.group, tag=tag))

    def wait(self, work: dist.Work) -> None:
        """Waits for a part of the operation, at most for the group's timeout.

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        with self.waiting():
            limit = limit_of_messages(self.group)
            work.wait() if limit is None else work.wait(limit)

    def memory_for(self, tensor: torch.Tensor) -> GroupMemory | None:
        """Returns the shared memory that this collective of CPU tensors goes through; None: the group's backend.

        Raises:
            RankFailedError: The group had to decide, and a rank is lost or too late.
        """
        with self.failures_named():
            return memory_of(self.group, tensor)

    def run(
        self, tensor: torch.Tensor, in_memory: Callable[[SharedMemory], None], by_backend: Callable[[], object]
    ) -> None:
        """Performs a collective of this tensor and waits for it, in one of two ways.

        Args:
            tensor: What is sent, or received.
            in_memory: Called with the group's shared memory where the tensor goes through that.
            by_backend: Called otherwise.

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        home = self.memory_for(tensor)
        if home is None:
            with self.waiting():
                by_backend()
        else:
            perform_started()  # first: where it fails, this operation has not begun
            Started(home, self, lambda: in_memory(home.memory)).finish()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds what waits for other ranks elsewhere than in shared memory.

        What was started in shared memory is performed before: see Note [Started operations].

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        perform_started()
        with self.failures_named():
            yield

    @contextmanager
    def failures_named(self) -> Iterator[None]:
        """Surrounds what this operation asks of its group: torch's error about a lost or late rank then names the rank.

        Meanwhile this rank is in the phase "communication".
        """
        with Phase("communication", self), failures_named(Place(self.name, self.number, self.peer), self.group):
            yield


def begin(
    name: str, group: dist.ProcessGroup | None, *, sent: int = 0, received: int = 0, peer: int | None = None
) -> Operation:
    """Returns the operation that starts now on this rank. Called in groups of several ranks only.

    Args:
        name: See `OPERATIONS`.
        group: The ranks that take part; None: the world.
        sent: Bytes that this rank gives.
        received: Bytes that it takes; those of a message of unknown size are recorded when it is known.
        peer: See `Operation`.

    Raises:
        ConfigError: The group was given back.
    """
    require_not_released(group)
    strike(name)
    record(name, sent=sent, received=received)
    with _lock:
        numbers = _numbers.setdefault(group or _get_default_group(), Counter())
        numbers[name, peer] += 1
        return Operation(name, group, numbers[name, peer], peer)


def _world_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _under_way(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise AssertionError("this rank is not in the group that it communicates in")
    return work


def _tag(kind: int, number: int) -> int:
    return _FIRST_TAG + kind * _TAGS_EACH + number % _TAGS_EACH
