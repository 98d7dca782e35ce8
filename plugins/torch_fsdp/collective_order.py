"""Common order of collectives where ranks may use different modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, all_reduce_max, collective_device, global_rank_of, group_rank, group_size
from booster.errors import DesyncError
from booster.validation import UNEVEN_CALLS

# Note [FSDP collective order]
# FSDP2 gathers the weights of a parameter group when its module runs, and reduces its gradients when they are ready.
# Where the data decide which modules run (experts, dropped layers), ranks reach different collectives, which would
# deadlock or mix up their bytes. So before each collective all ranks of the shard group all-reduce the sequence number
# of the one that they have reached, and all perform the smallest; numbers increase in the order of a forward and its
# backward. A rank that has reached a later collective participates passively, with its shard of the weights or with
# zeros, and synchronizes again. So a skipped module costs one more round. A rank at the end of a forward or backward
# participates passively until all ranks are there. If these are different ends, as after an evaluation on one rank
# only, all ranks raise. A round moves 16 bytes per rank.


class CollectiveKind(IntEnum):
    """Kind of collective; see Note [FSDP collective order]."""

    FORWARD_GATHER = 0
    BACKWARD_GATHER = 1
    REDUCE = 2
    FORWARD_END = 3
    BACKWARD_END = 4
    GRADIENTS_READ = 5  # gradients are read, by a step, clipping or a save


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
        reverse_index = num_groups - 1 - self.param_group
        if self.kind is CollectiveKind.FORWARD_GATHER:
            return self.param_group
        if self.kind in _ENDS:
            return 3 * num_groups + self.kind - CollectiveKind.FORWARD_END
        return num_groups + 2 * reverse_index + (self.kind is CollectiveKind.REDUCE)

    @classmethod
    def from_sequence_number(cls, number: int, num_groups: int) -> CollectiveRequest:
        """Return the request with this sequence number."""
        if number >= 3 * num_groups:
            return cls(CollectiveKind(CollectiveKind.FORWARD_END + number - 3 * num_groups))
        if number < num_groups:
            return cls(CollectiveKind.FORWARD_GATHER, number)
        reverse_index, reduces = divmod(number - num_groups, 2)
        return cls(CollectiveKind.REDUCE if reduces else CollectiveKind.BACKWARD_GATHER, num_groups - 1 - reverse_index)


@dataclass(frozen=True, slots=True)
class PassiveCallbacks:
    """Passive participation in a parameter group's collectives, for ranks that need them.

    Attributes:
        gather: Contributes the shard of the weights; the argument is True in a backward.
        reduce: Contributes zeros and accumulates the shard of the reduced gradients.
    """

    gather: Callable[[bool], None]
    reduce: Callable[[], None]


class CollectiveOrder:
    """Fixes the order of collectives over a shard group.

    Args:
        group: CPU process group, to avoid device syncs; None for the world group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._callbacks: Sequence[PassiveCallbacks] = ()
        self._in_flight: Callable[[], None] | None = None
        self.is_off = group_size(group) == 1

    def set_passive_callbacks(self, callbacks: Sequence[PassiveCallbacks]) -> None:
        """Set the passive callbacks of the parameter groups, by index."""
        self._callbacks = callbacks

    def synchronize(self, request: CollectiveRequest) -> None:
        """Return when `request` is next; participate passively in earlier ones. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        while not self.is_off:
            first, last = self._agree_on_next(request)
            if first.kind in _ENDS and first != last:
                self._raise_desync(request)
            if first == request:
                return
            self._participate(first)

    def synchronize_end(self, kind: CollectiveKind) -> None:
        """Return when all ranks have reached this end. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        self.synchronize(CollectiveRequest(kind))
        self.wait_in_flight()

    def set_in_flight(self, finish: Callable[[], None]) -> None:
        """Keep one reduction in flight while the backward continues; `finish` completes it, the previous one first."""
        self.wait_in_flight()
        self._in_flight = finish

    def wait_in_flight(self) -> None:
        """Complete the reduction in flight, if any."""
        finish, self._in_flight = self._in_flight, None
        if finish is not None:
            finish()

    def _agree_on_next(self, request: CollectiveRequest) -> tuple[CollectiveRequest, CollectiveRequest]:
        """Return the earliest and the latest of the ranks' requests."""
        num_groups = len(self._callbacks)
        number = request.sequence_number(num_groups)
        # The largest of the negative numbers is the smallest number.
        mine = torch.tensor([-number, number], dtype=torch.int64, device=collective_device(self._group))
        first, last = all_reduce_max(mine, self._group).tolist()
        return CollectiveRequest.from_sequence_number(-first, num_groups), CollectiveRequest.from_sequence_number(
            last, num_groups
        )

    def _raise_desync(self, request: CollectiveRequest) -> NoReturn:
        """Raise with the position of each rank. Collective over the group: all ranks have detected the desync."""
        mine = torch.tensor([[request.kind, global_rank_of(group_rank(self._group), self._group)]])
        kinds = all_gather_equal(mine.to(collective_device(self._group)), self._group).tolist()
        positions = ", ".join(f"rank {rank} is at {_ENDS[CollectiveKind(kind)]}" for kind, rank in kinds)
        raise DesyncError(f"{positions}: {UNEVEN_CALLS}")

    def _participate(self, request: CollectiveRequest) -> None:
        callbacks = self._callbacks[request.param_group]
        if request.kind is CollectiveKind.REDUCE:
            callbacks.reduce()
        else:
            callbacks.gather(request.kind is CollectiveKind.BACKWARD_GATHER)
