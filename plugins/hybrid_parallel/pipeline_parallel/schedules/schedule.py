"""Base class and registry of pipeline schedules."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from booster.errors import ConfigError


class ActionKind(enum.Enum):
    """Kind of computation.

    `BACKWARD` is the full backward. For schedules with `defers_weights` it computes only the gradients of a chunk's
    inputs, which the previous stage needs, and `BACKWARD_WEIGHT` computes those of its weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """An action; its text is `F3` for microbatch 3 on chunk 0, `F3.1` on chunk 1.

    Attributes:
        kind: Kind of computation.
        microbatch: Index of the microbatch, from 0.
        chunk: Index of the stage's chunk, from 0.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


# Note [Stages, chunks and positions]
# A stage is a rank of the pipeline axis. It holds one or more model chunks. A chunk's position is its index in the
# model: the forward of a microbatch passes through positions 0, 1, 2 and so on, its backward in reverse. A schedule
# assigns positions to stages, and orders the actions of each stage. Both are pure functions of numbers, so each stage
# can compute the actions and messages of all stages without communication.


class PipelineSchedule(ABC):
    """Order of the actions of each stage. To write one, subclass it and decorate with `@register_schedule`.

    Schedules are immutable; those of one class with equal attributes are equal.

    Attributes:
        name: Name in the registry.
        defers_weights: Whether `BACKWARD` computes gradients of inputs only and a later `BACKWARD_WEIGHT` the others.
    """

    name: ClassVar[str]
    defers_weights: ClassVar[bool] = False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        attributes = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({attributes})"

    def check(self, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
        """Validate the numbers; schedules with further requirements extend this method.

        Raises:
            ConfigError: A number is below 1.
        """
        given = {"pp_size": num_stages, "num_microbatches": num_microbatches, "num_model_chunks": num_chunks}
        for argument, number in given.items():
            if number < 1:
                raise ConfigError(
                    f"{argument}={number}, but the pipeline needs at least one: write {argument}=1 or more"
                )

    def position(self, stage: int, chunk: int, num_stages: int) -> int:
        """Return the position of a stage's chunk in the model; by default chunk 0 of all stages, then chunk 1, ..."""
        return chunk * num_stages + stage

    def place(self, position: int, num_stages: int) -> tuple[int, int]:
        """Return stage and chunk of a position; the inverse of `position`.

        Raises:
            ConfigError: No chunk has this position.
        """
        for chunk in range(position + 1):
            for stage in range(num_stages):
                if self.position(stage, chunk, num_stages) == position:
                    return stage, chunk
        raise ConfigError(
            f"schedule {self.name!r} has no chunk at position {position} of {num_stages} stages, but its chunks are the"
            " whole model: let position() number them 0, 1, 2, ... without a gap"
        )

    @abstractmethod
    def order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        """Return the actions of a stage in a training step, in order.

        There is a `FORWARD` and a `BACKWARD` (and a `BACKWARD_WEIGHT`, if deferred) for each microbatch and chunk.
        """

    def forward_order(self, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
        """Return the actions of a stage in evaluation; by default the `FORWARD`s of `order`."""
        actions = self.order(stage, num_stages, num_microbatches, num_chunks)
        return [action for action in actions if action.kind is ActionKind.FORWARD]


_SCHEDULES: dict[str, type[PipelineSchedule]] = {}

ScheduleClass = TypeVar("ScheduleClass", bound=type[PipelineSchedule])


def register_schedule(cls: ScheduleClass) -> ScheduleClass:
    """Class decorator that registers a schedule by its name; the class must be constructible without arguments.

    Raises:
        ConfigError: It is not a schedule, has no name, or the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, PipelineSchedule)):
        raise ConfigError(
            f"{cls!r} is not a pipeline schedule, so it can't be registered: derive it from PipelineSchedule"
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"schedule {cls.__qualname__} has name={name!r}, which is not a name: write name = '...' in the class"
        )
    known = _SCHEDULES.setdefault(name, cls)
    if known is not cls:
        raise ConfigError(
            f"schedule {cls.__qualname__} is named {name!r}, and so is {known.__module__}.{known.__qualname__}, so the"
            " name wouldn't tell which one: give yours another name"
        )
    return cls


def schedule_from_name(name: str) -> PipelineSchedule:
    """Return the schedule that is registered under a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _SCHEDULES:
        raise ConfigError(
            f"there is no pipeline schedule {name!r}: write one of {', '.join(map(repr, schedule_names()))}, or"
            " register your own with @register_schedule"
        )
    return _SCHEDULES[name]()


def schedule_names() -> list[str]:
    """Return the names of all registered schedules, sorted."""
    return sorted(_SCHEDULES)
