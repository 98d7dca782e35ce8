"""What a stage receives and sends with each of its works, and what arrives from whom in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.schedule import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind, Work

__all__ = ["Message", "Step", "incoming", "program", "stages_by_position"]


@dataclass(frozen=True, slots=True)
class Message:
    """What one piece of the model hands to the next (an output), or to the one before it (a gradient).

    Attributes:
        micro_batch: Which one it belongs to.
        position: The position of the piece that receives it.
        is_gradient: Whether it goes back.
        sender: The stage that sends it.
        receiver: The stage that receives it; the sender itself, where it holds both pieces: then nothing travels.
    """

    micro_batch: int
    position: int
    is_gradient: bool
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Step:
    """One work of a stage with what has to arrive before it, and what leaves after it.

    Attributes:
        work: What is done.
        position: The position of the piece that does it.
        receives: None for the forward of the first position, the backward of the last, and where weights are done.
        sends: None for the forward of the last position, the backward of the first, and where weights are done.
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
    """Returns all that a stage does in a step, with its messages. No communication.

    Args:
        schedule: The order.
        stage: Whose program; each stage can tell that of all.
        num_stages: How many there are.
        num_micro_batches: How many go through.
        num_chunks: How many each stage holds.
        forward_only: Whether nothing goes back, as in evaluation.

    Raises:
        ConfigError: The schedule can't work with these numbers.
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
    """Returns what other stages send to a stage, by sender, in the order in which the sender sends it.

    That may differ from the order in which the stage uses it. Arguments are those of `program`. No communication.
    """
    stages = stages_by_position(schedule, num_stages, num_chunks)
    # Only a neighbour sends: a stage at the position before or after one of this stage.
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
    """Returns the stage that holds each position, first to last."""
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
