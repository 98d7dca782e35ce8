"""Common order of collectives where ranks may use different modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

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

# Note [FSDP collective order]
# FSDP2 gathers the weights of a parameter group when its module runs, and reduces its gradients when they are ready.
# Where the data decide which modules run (experts, dropped layers), ranks reach different collectives, which would
# deadlock or mix up their bytes. So before each collective all ranks of the shard group all-reduce the sequence number
# of the one that they have reached, and all perform the smallest; numbers increase in the order of a forward and its
# backward. A rank that has reached a later collective participates passively, with its shard of the weights or with
# zeros, and synchronizes again. So a skipped module costs one more round. A rank at the end of a forward or backward
# participates passively until all ranks are there. If these are different ends, as after an evaluation on one rank
# only, all ranks raise. A round moves 16 bytes per rank.
# Gemini negotiates lists of chunks, because it gathers ahead of the modules and in any order. FSDP2 issues one
# collective at a time at fixed places, for which the smallest of one number is enough. The two share the exchange of
# numbers only.


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


class CollectiveOrder:
    """Fixes the order of collectives over a shard group.

    Args:
        group: CPU process group, to avoid device syncs; None for the world group.

    Attributes:
        participants: Passive participation in a collective of each parameter group, by its index.
        in_flight: Completes the one reduction that is in flight while the backward continues, or None.
        is_off: If True, there is nothing to order, as the group has one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.participants: Sequence[Callable[[CollectiveKind], None]] = ()
        self.in_flight: Callable[[], None] | None = None
        self.is_off = group_size(group) == 1

    def synchronize(self, request: CollectiveRequest) -> None:
        """Return when `request` is next; participate passively in earlier ones. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        while not self.is_off:
            first, last = self._agree_on_next(request)
            if first.kind in _ENDS and first != last:  # on all ranks, so they can exchange their positions
                mine = [request.kind, global_rank_of(group_rank(self._group), self._group)]
                kinds = all_gather_numbers(mine, self._group)
                positions = ", ".join(f"rank {rank} is at {_ENDS[CollectiveKind(kind)]}" for kind, rank in kinds)
                raise DesyncError(f"{positions}: {UNEVEN_CALLS}")
            if first == request:
                return
            self.participants[first.param_group](first.kind)

    def synchronize_end(self, kind: CollectiveKind) -> None:
        """Return when all ranks have reached this end. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        self.synchronize(CollectiveRequest(kind))
        self.wait_in_flight()

    def wait_in_flight(self) -> None:
        """Complete the reduction in flight, if any."""
        finish, self.in_flight = self.in_flight, None
        if finish is not None:
            finish()

    def _agree_on_next(self, request: CollectiveRequest) -> tuple[CollectiveRequest, CollectiveRequest]:
        """Return the earliest and the latest of the ranks' requests."""
        num_groups = len(self.participants)
        number = request.sequence_number(num_groups)
        # The largest of the negative numbers is the smallest number.
        first, last = max_of_numbers([-number, number], self._group)
        return CollectiveRequest.from_sequence_number(-first, num_groups), CollectiveRequest.from_sequence_number(
            last, num_groups
        )
