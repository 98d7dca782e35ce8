"""Action lists of stages with their sends and receives, and the order of incoming messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.schedule import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind, Work

__all__ = ["Message", "Step", "incoming", "program", "stages_by_position"]


@dataclass(frozen=True, slots=True)
class Message:
    """An activation sent to the next model chunk, or a gradient sent to the previous one.

    Attributes:
        micro_batch: Index of the microbatch.
        position: Position of the receiving chunk.
        is_gradient: Whether it is a gradient.
        sender: Sending stage.
        receiver: Receiving stage; equal to the sender if it holds both chunks, without communication.
    """

    micro_batch: int
    position: int
    is_gradient: bool
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a stage with the message that it needs and the one that it sends.

    Attributes:
        work: Action.
        position: Position of its chunk.
        receives: Message received before; None for the first forward, the last backward, and weight gradients.
        sends: Message sent after; None for the last forward, the first backward, and weight gradients.
    """

    work: Work
    position: int
    receives: Message | None
    sends: Message | None


def program(
    schedule: PipelineSchedule,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    *,
    forward_only: bool = False,
) -> list[Step]:
    """Return the actions of a stage in a step, with their messages. No communication.

    Args:
        schedule: Schedule.
        stage: Index of any stage.
        num_stages: Number of stages.
        num_micro_batches: Number of microbatches.
        num_chunks: Model chunks per stage.
        forward_only: If True, there are no backwards, as in evaluation.

    Raises:
        ConfigError: The schedule does not support these numbers.
    """
    return list(_program(schedule, stage, num_stages, num_micro_batches, num_chunks, forward_only))


def incoming(
    schedule: PipelineSchedule,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    *,
    forward_only: bool = False,
) -> dict[int, list[Message]]:
    """Return the messages from other stages to a stage, by sender, in sending order.

    That may differ from the order in which the stage needs them. Arguments are those of `program`. No communication.
    """
    stages = stages_by_position(schedule, num_stages, num_chunks)
    # Only stages of adjacent positions send.
    senders: set[int] = set()
    for position, holder in enumerate(stages):
        if holder == stage:
            senders.update(stages[max(position - 1, 0) : position + 2])
    messages: dict[int, list[Message]] = {}
    for sender in sorted(senders - {stage}):
        steps = _program(schedule, sender, num_stages, num_micro_batches, num_chunks, forward_only)
        sent = [step.sends for step in steps if step.sends is not None and step.sends.receiver == stage]
        if sent:
            messages[sender] = sent
    return messages


@lru_cache(maxsize=256)
def stages_by_position(schedule: PipelineSchedule, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the stage of each position, first to last."""
    return tuple(schedule.place(position, num_stages)[0] for position in range(num_stages * num_chunks))


@lru_cache(maxsize=256)
def _program(
    schedule: PipelineSchedule,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    forward_only: bool,
) -> tuple[Step, ...]:
    schedule.check(num_stages, num_micro_batches, num_chunks)
    stages = stages_by_position(schedule, num_stages, num_chunks)
    works = (schedule.forward_order if forward_only else schedule.order)(
        stage, num_stages, num_micro_batches, num_chunks
    )
    return tuple(_step(work, schedule.position(stage, work.chunk, num_stages), stages) for work in works)


def _step(work: Work, position: int, stages: tuple[int, ...]) -> Step:
    if work.kind is Kind.WEIGHT:
        return Step(work, position, None, None)
    is_gradient = work.kind is Kind.BACKWARD
    ahead = -1 if is_gradient else 1
    return Step(
        work,
        position,
        receives=_message(work.micro_batch, position - ahead, position, is_gradient, stages),
        sends=_message(work.micro_batch, position, position + ahead, is_gradient, stages),
    )


def _message(micro_batch: int, start: int, end: int, is_gradient: bool, stages: tuple[int, ...]) -> Message | None:
    if min(start, end) < 0 or max(start, end) >= len(stages):
        return None
    return Message(micro_batch, end, is_gradient, sender=stages[start], receiver=stages[end])
