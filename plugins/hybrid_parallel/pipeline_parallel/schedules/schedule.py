"""What a pipeline schedule decides, and the names under which schedules are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind, Work

__all__ = ["PipelineSchedule", "register_schedule", "schedule_from_name", "schedule_names"]

# Note [Stages, chunks and positions]
# A stage is a rank of the pipeline axis. It holds one or more chunks of the model, and a chunk's position is its place
# in the model: a micro-batch goes forward through positions 0, 1, 2 and so on, and its gradients back. A schedule says
# which stage holds which position, and in which order a stage works. Both are functions of numbers alone, so every
# stage can tell what each other one does, and when it sends what, without a message.


class PipelineSchedule(ABC):
    """In which order each stage works on its micro-batches. To write one: subclass, and `@register_schedule`.

    A schedule has no state that changes: schedules of one class with equal attributes count as the same one.

    Attributes:
        name: The name to ask for it by.
        defers_weights: Whether `BACKWARD` computes gradients of inputs alone, and a `WEIGHT` for each comes later.
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

    def check(self, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
        """Refuses numbers with which the schedule can't work; to be extended by schedules that ask for more.

        Raises:
            ConfigError: A number is below 1.
        """
        given = {"pp_size": num_stages, "num_microbatches": num_micro_batches, "num_model_chunks": num_chunks}
        for argument, number in given.items():
            if number < 1:
                raise ConfigError(
                    f"{argument}={number}, but the pipeline needs at least one: write {argument}=1 or more"
                )

    def position(self, stage: int, chunk: int, num_stages: int) -> int:
        """Returns the place in the model of a stage's chunk: chunk by chunk over all stages, if not overridden."""
        return chunk * num_stages + stage

    def place(self, position: int, num_stages: int) -> tuple[int, int]:
        """Returns the stage and the chunk that are at a position: what `position` says, the other way round.

        Raises:
            ConfigError: `position` of this schedule gives the number to no chunk.
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
    def order(self, stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Work]:
        """Returns all that a stage does in a training step, one after the other.

        That is a `FORWARD` and a `BACKWARD` (and a `WEIGHT`, if deferred) for each micro-batch and chunk.
        """

    def forward_order(self, stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Work]:
        """Returns all that a stage does where nothing goes back: the `FORWARD`s of `order`, if not overridden."""
        works = self.order(stage, num_stages, num_micro_batches, num_chunks)
        return [work for work in works if work.kind is Kind.FORWARD]


_SCHEDULES: dict[str, type[PipelineSchedule]] = {}

ScheduleClass = TypeVar("ScheduleClass", bound=type[PipelineSchedule])


def register_schedule(cls: ScheduleClass) -> ScheduleClass:
    """Makes a schedule known by its name; a decorator of a class that is made without arguments.

    Raises:
        ConfigError: It isn't a schedule, has no name, or another one has this name.
    """
    if not (isinstance(cls, type) and issubclass(cls, PipelineSchedule)):
        raise ConfigError(
            f"{cls!r} is no pipeline schedule, so it can't be registered: derive it from PipelineSchedule"
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"schedule {cls.__qualname__} has name={name!r}, by which nobody can ask for it: write name = '...' in the"
            " class"
        )
    known = _SCHEDULES.setdefault(name, cls)
    if known is not cls:
        raise ConfigError(
            f"schedule {cls.__qualname__} is named {name!r}, and so is {known.__module__}.{known.__qualname__}, so the"
            " name wouldn't tell which one: give yours another name"
        )
    return cls


def schedule_from_name(name: str) -> PipelineSchedule:
    """Returns the schedule that is registered under a name.

    Raises:
        ConfigError: None is; the message lists those that are.
    """
    if name not in _SCHEDULES:
        raise ConfigError(
            f"there is no pipeline schedule {name!r}: write one of {', '.join(map(repr, schedule_names()))}, or"
            " register your own with @register_schedule"
        )
    return _SCHEDULES[name]()


def schedule_names() -> list[str]:
    """Returns the names of all registered schedules, sorted."""
    return sorted(_SCHEDULES)
