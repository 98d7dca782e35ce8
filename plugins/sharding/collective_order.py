"""Common order of collectives where ranks may use different modules of a model, for Gemini and FSDP."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Generic, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from booster.comm import (
    all_gather_numbers,
    global_rank_of,
    group_rank,
    group_size,
    max_of_numbers,
)
from booster.errors import DesyncError
from booster.validation import UNEVEN_CALLS

# Note [Collective order]
# Control flow that depends on data, such as experts and dropped layers, may make a rank use modules that another rank
# skips, so ranks can need different collectives at the same time, which would deadlock or mix up their bytes. Therefore
# no rank starts a collective alone: ranks negotiate. Ranks that need nothing participate passively, with their shard of
# the weights or with zeros, and a rank that has finished its forward or backward negotiates until all have.
#
# Gemini gathers ahead of the modules and in any order, so its ranks exchange lists. When a rank needs chunks that are
# not gathered, or when the gradients of a chunk are complete, it sends a few integers to all. From these each rank
# computes the same list of collectives: first the reductions for which every rank is ready, then the all-gathers that
# any rank requests. A negotiation moves some 100 bytes, a chunk some 10 million.
#
# FSDP2 issues one collective at a time at fixed places: it gathers the weights of a parameter group when its module
# runs, and reduces its gradients when they are ready. The smallest of one number is enough for it: the ranks all-reduce
# the sequence number of the collective that each has reached, and all perform the smallest; numbers increase in the
# order of a forward and its backward. A rank that has reached a later one participates passively and negotiates again.
# So a skipped module costs one more round, of 16 bytes per rank.

Request = TypeVar("Request", bound=Hashable)
Outcome = TypeVar("Outcome")

# Note [Replayed passes]
# Where data decide which modules run, ranks negotiate each collective: a rank sends its request, and all run the
# outcome, which is the same on all ranks. A negotiation is a barrier of all hosts, and most models run the same modules
# in each pass. So every rank records the requests and outcomes of a pass. When a pass has repeated the one before on
# all ranks, the next one of its kind is replayed: after one exchange at its start, by which all know that all begin it,
# a rank takes the outcome of each request from the record.
# A rank whose requests change during a replay must not start other collectives, as the others don't know of it. It runs
# the recorded outcomes up to the one that it needs, as a passive participant, with its shard of the weights or with
# zeros; if it needs one that is not recorded, it runs all of them and then negotiates. The others meet it at the end of
# their pass, where all negotiate until all are done. So a replay never waits for a rank that does not come, and a
# change costs at most the collectives of one more pass. After it, the kind of pass must repeat twice as often as before
# until it is replayed, so that a model whose modules change now and then negotiates, as without replays. A rank whose
# forward has failed may run it again, so it owes the others the rest of the record, before its next negotiation.

_MIN_TURNS = 2  # a replay takes one exchange more


@dataclass(slots=True)
class _Record(Generic[Request, Outcome]):
    """The last pass of one kind, and how often it was repeated.

    Attributes:
        turns: This rank's requests and their outcomes; the request is None where it waited for other ranks.
        num_repeats: Number of passes since the last change of any rank.
        num_needed: Number of repeats from which passes are replayed.
        digest: Hash of the outcomes, once they are replayed.
    """

    turns: list[tuple[Request | None, Outcome]] = field(default_factory=list)
    num_repeats: int = 0
    num_needed: int = 1
    digest: int = 0

    def change(self, turns: list[tuple[Request | None, Outcome]]) -> None:
        """Record another pass."""
        self.turns, self.num_repeats, self.digest = turns, 0, 0


class OrderReplay(Generic[Request, Outcome]):
    """Records the negotiated collectives of passes, and replays those that repeat; see Note [Replayed passes].

    Args:
        participate: Runs the collectives of an outcome as a passive participant.
    """

    def __init__(self, participate: Callable[[Outcome], None]) -> None:
        self._participate = participate
        self._records: dict[Hashable, _Record[Request, Outcome]] = {}
        self._kind: Hashable = None
        self._turns: list[tuple[Request | None, Outcome]] | None = None  # of the current pass
        self._left: list[tuple[Request | None, Outcome]] | None = None  # of the record, if it is replayed; in reverse
        self._has_changed = False

    def digest(self, kind: Hashable) -> int:
        """Return a number equal on ranks with the same record of a kind of pass; 0 if it is not to be replayed."""
        record = self._records.get(kind)
        if record is None or record.num_repeats < record.num_needed or len(record.turns) < _MIN_TURNS:
            return 0
        if record.digest == 0:
            record.digest = 1 + crc32(repr((kind, [outcome for _, outcome in record.turns])).encode())
        return record.digest

    def begin(self, kind: Hashable, *, replays: bool) -> None:
        """Begin a pass.

        Args:
            kind: Kind of pass; those of one kind are compared.
            replays: If True, all ranks begin it with the same `digest`, and not 0.
        """
        self._kind, self._turns, self._has_changed = kind, [], False
        self._left = self._records[kind].turns[::-1] if replays else None

    def replay(self, request: Request) -> Outcome | None:
        """Return the recorded outcome of a request, after those before it; None if it is to be negotiated."""
        if self._turns is None:
            self.replay_rest()
        while self._left:
            recorded, outcome = self._left.pop()
            if recorded == request:
                return outcome
            self._has_changed = True
            self._participate(outcome)
        return None

    def replay_rest(self) -> None:
        """Run what is left of the record: at the end of this rank's pass, and before what follows an aborted one."""
        while self._left:
            self._has_changed = True
            self._participate(self._left.pop()[1])

    def record(self, request: Request | None, outcome: Outcome) -> None:
        """Record a negotiation of the current pass, if there is one; None: this rank is at its end and waits."""
        if self._turns is not None:
            self._turns.append((request, outcome))

    @property
    def repeats(self) -> bool:
        """Whether this rank's pass has repeated the recorded one, at its end."""
        if self._turns is None:
            return False
        if self._left is not None:
            return not self._has_changed and not self._turns
        return self._kind in self._records and self._turns == self._records[self._kind].turns

    def end(self, *, all_repeat: bool) -> None:
        """End the current pass, if there is one, which `repeats` on all ranks or not."""
        if self._turns is None:
            return
        record = self._records.setdefault(self._kind, _Record())
        if all_repeat:
            record.num_repeats += 1
        else:
            record.num_needed *= 1 if self._left is None else 2
            record.change(self._turns if self._left is None else [])
        self._turns = self._left = None

    def abort(self, *, others_go_on: bool = False) -> None:
        """Drop the record of the current pass, if there is one, as an error has ended it on this rank.

        Args:
            others_go_on: If True, the error may be this rank's alone: it takes part in the rest of a replay later,
                before its next negotiation.
        """
        if self._turns is not None:
            self._records.setdefault(self._kind, _Record()).change([])
            self._turns = None
            if not others_go_on:
                self._left = None


# Gemini: lists of chunks.


class PassKind(IntEnum):
    """The pass that a rank is running."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Request of one rank in a negotiation.

    Attributes:
        phase: The pass that the rank is running.
        gather_requests: Indices of the chunks to gather, the most urgent first.
        num_ready: Number of chunks, in the order of reductions, that are ready to be reduced.
        is_done: True at the end of the pass.
        has_late_grads: True if gradients arrived after the reduction of their chunk, or their chunk is incomplete.
        begins: At the start of a pass that this rank can replay, the digest of its record; otherwise 0.
        repeats: True at the end of a pass that has repeated the one before.
    """

    phase: PassKind
    gather_requests: tuple[int, ...] = ()
    num_ready: int = 0
    is_done: bool = False
    has_late_grads: bool = False
    begins: int = 0
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class AgreedCollectives:
    """Collectives that all ranks run after a negotiation.

    Attributes:
        num_ready: Number of chunks, in the order of reductions, whose reductions are started.
        gathers: Indices of the chunks that are gathered then, in this order.
    """

    num_ready: int
    gathers: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[RankRequest]) -> AgreedCollectives:
        """Derive the collectives from the requests of all ranks."""
        return cls(
            min(request.num_ready for request in requests),
            tuple(dict.fromkeys(chain.from_iterable(request.gather_requests for request in requests))),
        )


class OrderNegotiation:
    """Negotiation between the ranks of a shard group.

    Args:
        group: Process group with a CPU backend, which avoids device syncs. None is the world group.
        max_gather_requests: Maximum number of chunks in one request.
    """

    def __init__(self, group: dist.ProcessGroup | None, max_gather_requests: int) -> None:
        self.group = group
        self.max_gather_requests = max_gather_requests

    def exchange(self, request: RankRequest) -> list[RankRequest]:
        """Return the requests of all ranks, in rank order. Collective over the group.

        Raises:
            DesyncError: Some ranks have finished a backward while the others have finished a forward.
        """
        if group_size(self.group) == 1:
            return [request]
        gather_requests = list(request.gather_requests[: self.max_gather_requests])
        gather_requests += [-1] * (self.max_gather_requests - len(gather_requests))
        flags = [request.is_done, request.has_late_grads, request.repeats]
        numbers = [request.phase, request.num_ready, request.begins, *flags, *gather_requests]
        requests = [_request_from_row(row) for row in all_gather_numbers(numbers, self.group)]
        if all(post.is_done for post in requests) and len({post.phase for post in requests}) > 1:
            backward = [global_rank_of(rank, self.group) for rank, one in enumerate(requests) if one.phase]
            raise DesyncError(
                f"ranks {backward} have finished a backward while the others have finished a forward: {UNEVEN_CALLS}"
            )
        return requests


def _request_from_row(row: Sequence[int]) -> RankRequest:
    phase, num_ready, begins, is_done, has_late_grads, repeats, *gather_requests = row
    return RankRequest(
        phase=PassKind(phase),
        gather_requests=tuple(chunk for chunk in gather_requests if chunk >= 0),
        num_ready=num_ready,
        is_done=bool(is_done),
        has_late_grads=bool(has_late_grads),
        begins=begins,
        repeats=bool(repeats),
    )


# FSDP: sequence numbers.


class CollectiveKind(IntEnum):
    """Kind of collective; see Note [Collective order]."""

    FORWARD_BEGIN = -2  # nothing is communicated; see Note [Replayed passes]
    BACKWARD_BEGIN = -1
    FORWARD_GATHER = 0
    BACKWARD_GATHER = 1
    REDUCE = 2
    FORWARD_END = 3
    BACKWARD_END = 4
    GRADIENTS_READ = 5  # gradients are read, by a step, clipping or a save


_MAX_MARK = 2**33  # above all digests

_ENDS = {
    CollectiveKind.FORWARD_END: "the end of a forward",
    CollectiveKind.BACKWARD_END: "the end of a backward",
    CollectiveKind.GRADIENTS_READ: "a step",
}


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A collective of a parameter group, or an end that all ranks reach.

    Attributes:
        kind: Kind of collective.
        param_group: Index of the parameter group in the model.
    """

    kind: CollectiveKind
    param_group: int = 0

    def sequence_number(self, num_groups: int) -> int:
        """Return the sequence number in a forward and backward of `num_groups` parameter groups."""
        if self.kind < 0:
            return int(self.kind)
        reverse_index = num_groups - 1 - self.param_group
        if self.kind is CollectiveKind.FORWARD_GATHER:
            return self.param_group
        if self.kind in _ENDS:
            return 3 * num_groups + self.kind - CollectiveKind.FORWARD_END
        return num_groups + 2 * reverse_index + (self.kind is CollectiveKind.REDUCE)

    @classmethod
    def from_sequence_number(cls, number: int, num_groups: int) -> CollectiveRequest:
        """Return the request with this sequence number."""
        if number < 0:
            return cls(CollectiveKind(number))
        if number >= 3 * num_groups:
            return cls(CollectiveKind(CollectiveKind.FORWARD_END + number - 3 * num_groups))
        if number < num_groups:
            return cls(CollectiveKind.FORWARD_GATHER, number)
        reverse_index, reduces = divmod(number - num_groups, 2)
        return cls(CollectiveKind.REDUCE if reduces else CollectiveKind.BACKWARD_GATHER, num_groups - 1 - reverse_index)


_orders: weakref.WeakSet[CollectiveOrder] = weakref.WeakSet()


def is_any_pass_running() -> bool:
    """Return whether a forward or backward of any model runs."""
    return any(one.is_in_pass for one in list(_orders))


class CollectiveOrder:
    """Fixes the order of collectives over a shard group.

    Args:
        group: CPU process group, to avoid device syncs; None for the world group.
        device: Device that the model computes on.

    Attributes:
        participants: Passive participation in a collective of each parameter group, by its index.
        in_flight: Completes the one reduction that is in flight while the backward continues, or None.
        is_off: If True, there is nothing to order, as the group has one rank.
        is_in_pass: Whether a forward or a backward runs.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stream: torch.Stream | None = None
        self.participants: Sequence[Callable[[CollectiveKind], None]] = ()
        self.in_flight: Callable[[], None] | None = None
        self.is_off = group_size(group) == 1
        self._replay: OrderReplay[CollectiveRequest, CollectiveRequest] = OrderReplay(self._participate)
        self._is_forward = True
        self.is_in_pass = False
        _orders.add(self)

    @property
    def gather_kind(self) -> CollectiveKind:
        """Kind of an all-gather in the current pass."""
        return CollectiveKind.FORWARD_GATHER if self._is_forward else CollectiveKind.BACKWARD_GATHER

    def begin_pass(self, kind: CollectiveKind, *variant: bool) -> None:
        """Begin a forward or a backward: FORWARD_BEGIN or BACKWARD_BEGIN. Collective over the group.

        Args:
            kind: Kind of pass.
            variant: Whatever else makes passes differ; those of one variant are compared.
        """
        self.abort_pass()  # one that has not ended
        self._is_forward, self.is_in_pass = kind is CollectiveKind.FORWARD_BEGIN, True
        if self.is_off:
            return
        self._replay.replay_rest()
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream(self._device)
        request, digest = CollectiveRequest(kind), self._replay.digest((kind, *variant))
        is_unanimous = False
        while digest:
            first, last, least, most = self._agree_on_next(request, digest)
            if first == request:
                is_unanimous = first == last and least == most
                break
            self._participate(first)
        self._replay.begin((kind, *variant), replays=is_unanimous)

    def synchronize(self, request: CollectiveRequest) -> None:
        """Return when `request` is next; participate passively in earlier ones. Collective over the group."""
        while not self.is_off:
            first = self._replay.replay(request)
            if first is None:
                first, *_ = self._agree_on_next(request, 0)
                self._replay.record(request, first)
            if first == request:
                return
            self._participate(first)

    def synchronize_end(self, kind: CollectiveKind) -> None:
        """Return when all ranks have reached this end. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        request = CollectiveRequest(kind)
        if not self.is_off:
            self._replay.replay_rest()
        while not self.is_off:
            first, last, least, _ = self._agree_on_next(request, int(self._replay.repeats))
            if first.kind in _ENDS and first != last:  # on all ranks, so they can exchange their positions
                mine = [request.kind, global_rank_of(group_rank(self._group), self._group)]
                kinds = all_gather_numbers(mine, self._group)
                positions = ", ".join(f"rank {rank} is at {_ENDS[CollectiveKind(kind)]}" for kind, rank in kinds)
                raise DesyncError(f"{positions}: {UNEVEN_CALLS}")
            if first == request:
                self._replay.end(all_repeat=bool(least))
                break
            self._replay.record(None, first)
            self._participate(first)
        self.is_in_pass = False
        self.wait_in_flight()

    def abort_pass(self) -> None:
        """Abort the current pass, which an error has ended on this rank."""
        self.is_in_pass = False
        self._replay.abort(others_go_on=self._is_forward)

    def wait_in_flight(self) -> None:
        """Complete the reduction in flight, if any."""
        finish, self.in_flight = self.in_flight, None
        if finish is not None:
            finish()

    def _participate(self, request: CollectiveRequest) -> None:
        """Take part in a collective that this rank does not request now."""
        if request.kind < 0:
            return
        # In the stream of the pass, also if FSDP2 requests a gather in its own: gradients are read and freed there.
        with self._stream or nullcontext():
            self.participants[request.param_group](request.kind)

    def _agree_on_next(
        self, request: CollectiveRequest, mark: int
    ) -> tuple[CollectiveRequest, CollectiveRequest, int, int]:
        """Return the earliest and the latest of the ranks' requests, and the smallest and the largest mark."""
        num_groups = len(self.participants)
        number = request.sequence_number(num_groups) * _MAX_MARK + mark  # compared by request first, then by mark
        # The largest of the negative numbers is the smallest number.
        first, last = max_of_numbers([-number, number], self._group)
        (earliest, least), (latest, most) = divmod(-first, _MAX_MARK), divmod(last, _MAX_MARK)
        of_number = CollectiveRequest.from_sequence_number
        return of_number(earliest, num_groups), of_number(latest, num_groups), least, most
