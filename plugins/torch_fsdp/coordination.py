"""Common order of collectives where ranks may use different modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import torch
import torch.distributed as dist

from booster.comm import (
    all_gather_equal,
    all_reduce_max,
    collective_device,
    global_rank_of,
    group_rank,
    group_size,
)
from booster.errors import DesyncError
from booster.plugins.sharding.checks import UNEVEN_CALLS

__all__ = ["Coordinator", "Served", "Task", "TaskKind"]

# Note [Whose turn it is]
# FSDP2 gathers the weights of a parameter group when its module runs, and reduces its gradients when they are ready.
# Where the data decide which modules run (experts, dropped layers), ranks reach different collectives, which would
# deadlock or mix up their bytes. So before each collective all ranks of the shard group all-reduce the sequence number
# of the one that they have reached, and all perform the smallest; numbers increase in the order of a forward and its
# backward. A rank that has reached a later collective participates passively, with its shard of the weights or with
# zeros, and synchronizes again. So a skipped module costs one more round. A rank at the end of a forward or backward
# participates passively until all ranks are there. If these are different ends, as after an evaluation on one rank
# only, all ranks raise. A round moves 16 bytes per rank.


class TaskKind(IntEnum):
    """Kind of collective; see Note [Whose turn it is]."""

    FORWARD_GATHER = 0
    BACKWARD_GATHER = 1
    REDUCE = 2
    FORWARD_END = 3
    BACKWARD_END = 4
    COLLECTION = 5  # gradients are read, by a step, clipping or a save


_ENDS = {
    TaskKind.FORWARD_END: "the end of a forward",
    TaskKind.BACKWARD_END: "the end of a backward",
    TaskKind.COLLECTION: "a step",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A collective of a parameter group, or an end that all ranks reach.

    Attributes:
        kind: Kind of collective.
        unit: Index of the parameter group in the model.
    """

    kind: TaskKind
    unit: int = 0

    def number(self, num_units: int) -> int:
        """Return the sequence number in a forward and backward of `num_units` parameter groups."""
        from_behind = num_units - 1 - self.unit
        if self.kind is TaskKind.FORWARD_GATHER:
            return self.unit
        if self.kind in _ENDS:
            return 3 * num_units + self.kind - TaskKind.FORWARD_END
        return num_units + 2 * from_behind + (self.kind is TaskKind.REDUCE)

    @classmethod
    def of_number(cls, number: int, num_units: int) -> Task:
        """Return the request with this sequence number."""
        if number >= 3 * num_units:
            return cls(TaskKind(TaskKind.FORWARD_END + number - 3 * num_units))
        if number < num_units:
            return cls(TaskKind.FORWARD_GATHER, number)
        from_behind, reduces = divmod(number - num_units, 2)
        return cls(TaskKind.REDUCE if reduces else TaskKind.BACKWARD_GATHER, num_units - 1 - from_behind)


@dataclass(frozen=True, slots=True)
class Served:
    """Passive participation in a parameter group's collectives, for ranks that need them.

    Attributes:
        gather: Contributes the shard of the weights; the argument is True in a backward.
        reduce: Contributes zeros and accumulates the shard of the reduced gradients.
    """

    gather: Callable[[bool], None]
    reduce: Callable[[], None]


class Coordinator:
    """Fixes the order of collectives over a shard group.

    Args:
        group: CPU process group, to avoid device syncs; None for the world group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._units: Sequence[Served] = ()
        self._in_flight: Callable[[], None] | None = None
        self.is_off = group_size(group) == 1

    def serve_with(self, units: Sequence[Served]) -> None:
        """Set the passive callbacks of the parameter groups, by index."""
        self._units = units

    def arrive(self, task: Task) -> None:
        """Return when `task` is next; participate passively in earlier ones. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        while not self.is_off:
            first, last = self._choose(task)
            if first.kind in _ENDS and first != last:
                self._raise_desync(task)
            if first == task:
                return
            self._serve(first)

    def close(self, kind: TaskKind) -> None:
        """Return when all ranks have reached this end. Collective over the group.

        Raises:
            DesyncError: The ranks have reached different ends.
        """
        self.arrive(Task(kind))
        self.finish_flight()

    def fly(self, finish: Callable[[], None]) -> None:
        """Keep one reduction in flight while the backward continues; `finish` completes it, the previous one first."""
        self.finish_flight()
        self._in_flight = finish

    def finish_flight(self) -> None:
        """Complete the reduction in flight, if any."""
        finish, self._in_flight = self._in_flight, None
        if finish is not None:
            finish()

    def _choose(self, task: Task) -> tuple[Task, Task]:
        """Return the earliest and the latest of the ranks' requests."""
        num_units = len(self._units)
        number = task.number(num_units)
        # The largest of the negative numbers is the smallest number.
        mine = torch.tensor([-number, number], dtype=torch.int64, device=collective_device(self._group))
        first, last = all_reduce_max(mine, self._group).tolist()
        return Task.of_number(-first, num_units), Task.of_number(last, num_units)

    def _raise_desync(self, task: Task) -> NoReturn:
        """Raise with the position of each rank. Collective over the group: all ranks have detected the desync."""
        mine = torch.tensor([[task.kind, global_rank_of(group_rank(self._group), self._group)]])
        kinds = all_gather_equal(mine.to(collective_device(self._group)), self._group).tolist()
        places = ", ".join(f"rank {rank} is at {_ENDS[TaskKind(kind)]}" for kind, rank in kinds)
        raise DesyncError(f"{places}: {UNEVEN_CALLS}")

    def _serve(self, task: Task) -> None:
        unit = self._units[task.unit]
        if task.kind is TaskKind.REDUCE:
            unit.reduce()
        else:
            unit.gather(task.kind is TaskKind.BACKWARD_GATHER)
