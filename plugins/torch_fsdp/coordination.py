"""Which collective comes next, where ranks may use different parts of a model."""

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
# FSDP2 gathers a unit's weights when the unit runs, and reduces its gradients when they are there. Where data decide
# which units run (experts, dropped layers), ranks come to different collectives, and wait for each other for ever or
# mix up each other's bytes. So before each collective of a unit all ranks of the shard group say which one they have
# come to, a single number each, and the smallest is performed by all: numbers grow in the order in which a forward and
# its backward come by the units. Who has come to that one performs it; who has not *serves* it, with its shard of the
# weights or with zeros, and asks again. So a rank that skips a unit costs one more round, and ranks are in step again
# behind it. Who has come to the end of a forward or backward serves until all have; where these are ends of different
# things, as where one rank has evaluated alone, all ranks raise. A round moves 16 bytes per rank.


class TaskKind(IntEnum):
    """What a rank has come to; see Note [Whose turn it is]."""

    FORWARD_GATHER = 0
    BACKWARD_GATHER = 1
    REDUCE = 2
    FORWARD_END = 3
    BACKWARD_END = 4
    COLLECTION = 5  # gradients are asked for, by a step, clipping or a save


_ENDS = {
    TaskKind.FORWARD_END: "the end of a forward",
    TaskKind.BACKWARD_END: "the end of a backward",
    TaskKind.COLLECTION: "a step",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A collective of a unit, or an end that all ranks come to.

    Attributes:
        kind: Which collective.
        unit: The unit's index in the model.
    """

    kind: TaskKind
    unit: int = 0

    def number(self, num_units: int) -> int:
        """Returns its place in the order of a forward and backward."""
        from_behind = num_units - 1 - self.unit
        if self.kind is TaskKind.FORWARD_GATHER:
            return self.unit
        if self.kind in _ENDS:
            return 3 * num_units + self.kind - TaskKind.FORWARD_END
        return num_units + 2 * from_behind + (self.kind is TaskKind.REDUCE)

    @classmethod
    def of_number(cls, number: int, num_units: int) -> Task:
        """Returns the task whose place it is."""
        if number >= 3 * num_units:
            return cls(TaskKind(TaskKind.FORWARD_END + number - 3 * num_units))
        if number < num_units:
            return cls(TaskKind.FORWARD_GATHER, number)
        from_behind, reduces = divmod(number - num_units, 2)
        return cls(TaskKind.REDUCE if reduces else TaskKind.BACKWARD_GATHER, num_units - 1 - from_behind)


@dataclass(frozen=True, slots=True)
class Served:
    """How a rank takes part in a unit's collectives for the others' sake.

    Attributes:
        gather: Gives its shard of the weights; told whether in a backward.
        reduce: Gives zeros, and takes its part of the sums.
    """

    gather: Callable[[bool], None]
    reduce: Callable[[], None]


class Coordinator:
    """The ranks of a shard group.

    Args:
        group: On the CPU, so that nobody waits for an accelerator; None: the world.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._units: Sequence[Served] = ()
        self._in_flight: Callable[[], None] | None = None
        self.is_off = group_size(group) == 1

    def serve_with(self, units: Sequence[Served]) -> None:
        """Says what serves each unit, by index."""
        self._units = units

    def arrive(self, task: Task) -> None:
        """Returns when it is this task's turn. Collective over the group.

        Raises:
            DesyncError: The ranks have come to the ends of different things.
        """
        while not self.is_off:
            first, last = self._choose(task)
            if first.kind in _ENDS and first != last:
                self._raise_desync(task)
            if first == task:
                return
            self._serve(first)

    def close(self, kind: TaskKind) -> None:
        """Returns when all ranks have come to this end. Collective over the group.

        Raises:
            DesyncError: They have come to the ends of different things.
        """
        self.arrive(Task(kind))
        self.finish_flight()

    def fly(self, finish: Callable[[], None]) -> None:
        """Notes what ends a reduction that has started, while the backward goes on; the one before ends first."""
        self.finish_flight()
        self._in_flight = finish

    def finish_flight(self) -> None:
        """Ends the reduction that is under way."""
        finish, self._in_flight = self._in_flight, None
        if finish is not None:
            finish()

    def _choose(self, task: Task) -> tuple[Task, Task]:
        """Returns the first and the last of the ranks' tasks."""
        num_units = len(self._units)
        number = task.number(num_units)
        # The largest of the negative numbers is the smallest number.
        mine = torch.tensor([-number, number], dtype=torch.int64, device=collective_device(self._group))
        first, last = all_reduce_max(mine, self._group).tolist()
        return Task.of_number(-first, num_units), Task.of_number(last, num_units)

    def _raise_desync(self, task: Task) -> NoReturn:
        """Raises what says where each rank is. Collective over the group: all ranks have found it."""
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
