"""Action lists of stages with their sends and receives, and the order of incoming messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .schedule import Action, ActionKind, PipelineSchedule


@dataclass(frozen=True, slots=True)
class Message:
    """An activation sent to the next model chunk, or a gradient sent to the previous one.

    Attributes:
        microbatch: Index of the microbatch.
        position: Position of the receiving chunk.
        is_gradient: Whether it is a gradient.
        sender: Sending stage.
        receiver: Receiving stage; equal to the sender if it holds both chunks, without communication.
    """

    microbatch: int
    position: int
    is_gradient: bool
    sender: int
    receiver: int

    @property
    def is_to_later_stage(self) -> bool:
        """Whether the receiver is a stage of a higher index."""
        return self.sender < self.receiver


@dataclass(frozen=True, slots=True)
class StageAction:
    """One action of a stage with the message that it needs and the one that it sends.

    Attributes:
        action: Action.
        position: Position of its chunk.
        receives: Message received before; None for the first forward, the last backward, and weight gradients.
        sends: Message sent after; None for the last forward, the first backward, and weight gradients.
    """

    action: Action
    position: int
    receives: Message | None
    sends: Message | None


@lru_cache(maxsize=256)
def action_list(
    schedule: PipelineSchedule,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    forward_only: bool = False,
) -> tuple[StageAction, ...]:
    """Return the actions of a stage in a step, with their messages. No communication.

    Args:
        schedule: Schedule.
        stage: Index of any stage.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        num_chunks: Model chunks per stage.
        forward_only: If True, there are no backwards, as in evaluation.

    Raises:
        ConfigError: The schedule does not support these numbers.
    """
    schedule.check(num_stages, num_microbatches, num_chunks)
    stages = stages_by_position(schedule, num_stages, num_chunks)
    order = schedule.forward_order if forward_only else schedule.order
    return tuple(
        _stage_action(action, schedule.position(stage, action.chunk, num_stages), stages)
        for action in order(stage, num_stages, num_microbatches, num_chunks)
    )


def incoming_messages(
    schedule: PipelineSchedule,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    forward_only: bool = False,
) -> dict[int, list[Message]]:
    """Return the messages from other stages to a stage, by sender, in sending order.

    That may differ from the order in which the stage needs them. Arguments: see `action_list`. No communication.
    """
    stages = stages_by_position(schedule, num_stages, num_chunks)
    # Only stages of adjacent positions send.
    senders: set[int] = set()
    for position, holder in enumerate(stages):
        if holder == stage:
            senders.update(stages[max(position - 1, 0) : position + 2])
    messages: dict[int, list[Message]] = {}
    for sender in sorted(senders - {stage}):
        steps = action_list(schedule, sender, num_stages, num_microbatches, num_chunks, forward_only=forward_only)
        sent = [step.sends for step in steps if step.sends is not None and step.sends.receiver == stage]
        if sent:
            messages[sender] = sent
    return messages


@lru_cache(maxsize=256)
def stages_by_position(schedule: PipelineSchedule, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the stage of each position, first to last."""
    return tuple(schedule.place(position, num_stages)[0] for position in range(num_stages * num_chunks))


def _stage_action(action: Action, position: int, stages: tuple[int, ...]) -> StageAction:
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return StageAction(action, position, None, None)
    is_gradient = action.kind is ActionKind.BACKWARD
    ahead = -1 if is_gradient else 1
    return StageAction(
        action,
        position,
        receives=_message(action.microbatch, position - ahead, position, is_gradient, stages),
        sends=_message(action.microbatch, position, position + ahead, is_gradient, stages),
    )


def _message(microbatch: int, start: int, end: int, is_gradient: bool, stages: tuple[int, ...]) -> Message | None:
    if min(start, end) < 0 or max(start, end) >= len(stages):
        return None
    return Message(microbatch, end, is_gradient, sender=stages[start], receiver=stages[end])
