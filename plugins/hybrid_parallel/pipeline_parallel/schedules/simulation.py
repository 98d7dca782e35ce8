"""Simulation of schedules: step time, bubble fraction and peak number of activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from booster.errors import ConfigError, format_list

from .communication import Message, StageAction, action_list
from .schedule import Action, ActionKind, PipelineSchedule

_MAX_NAMED = 8  # blocked actions listed in a message

# Result of an action: its kind, the microbatch and the position.
_Result = tuple[ActionKind, int, int]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs per microbatch of a full stage with all its chunks, in any unit of time.

    Attributes:
        forward: Forward.
        backward_input: Gradients of the inputs.
        weight: Gradients of the weights; added to the above if they are not deferred.
        message: Latency of a message to another stage, overlapped with computation.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    weight: float = 1.0
    message: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Result of a simulated step.

    Attributes:
        length: Time from the start of the first action to the end of the last.
        busy: Compute time of each stage.
        bubble_fraction: Idle share of all stages' time.
        peak_live: Per stage, peak number of chunk activations kept from `FORWARD` to `BACKWARD`; 0 without backwards.
        peak_pending: Per stage, peak number of chunk activations kept until their last use, deferred wgrad included.
        starts: Start time of each action of each stage.
    """

    length: float
    busy: tuple[float, ...]
    bubble_fraction: float
    peak_live: tuple[int, ...]
    peak_pending: tuple[int, ...]
    starts: dict[tuple[int, Action], float]


_EQUAL = Costs()


def simulate(
    schedule: PipelineSchedule,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    costs: Costs = _EQUAL,
    *,
    forward_only: bool = False,
) -> Timeline:
    """Simulate a schedule: each action starts once its stage is free and its inputs have arrived.

    The run time is linear in the number of actions. No communication.

    Args:
        schedule: Schedule.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        num_chunks: Model chunks per stage.
        costs: Costs of the actions; optional, defaults to equal ones.
        forward_only: If True, there are no backwards, as in evaluation.

    Returns:
        Start times and statistics.

    Raises:
        ConfigError: The schedule does not support these numbers, or deadlocks.
    """
    action_lists = [
        action_list(schedule, stage, num_stages, num_microbatches, num_chunks, forward_only=forward_only)
        for stage in range(num_stages)
    ]
    cost = {kind: _cost(schedule, costs, kind) / num_chunks for kind in ActionKind}
    starts = _Simulation(action_lists, cost, costs.message).starts()
    ends = [start + cost[action.kind] for (_, action), start in starts.items()]
    length = max(ends, default=0.0) - min(starts.values(), default=0.0)
    busy = tuple(sum(cost[step.action.kind] for step in steps) for steps in action_lists)
    last = ActionKind.BACKWARD_WEIGHT if schedule.defers_weights else ActionKind.BACKWARD
    return Timeline(
        length=length,
        busy=busy,
        bubble_fraction=1.0 - sum(busy) / (num_stages * length) if length else 0.0,
        peak_live=tuple(0 if forward_only else _peak(steps, ActionKind.BACKWARD) for steps in action_lists),
        peak_pending=tuple(0 if forward_only else _peak(steps, last) for steps in action_lists),
        starts=starts,
    )


def _cost(schedule: PipelineSchedule, costs: Costs, kind: ActionKind) -> float:
    """Return the cost of an action of all chunks."""
    if kind is ActionKind.FORWARD:
        return costs.forward
    if kind is ActionKind.BACKWARD_WEIGHT:
        return costs.weight
    return costs.backward_input + (0.0 if schedule.defers_weights else costs.weight)


@lru_cache(maxsize=256)
def message_order(
    schedule: PipelineSchedule, num_stages: int, num_microbatches: int, num_chunks: int, *, forward_only: bool = False
) -> tuple[Message, ...]:
    """Return the messages between stages in the order of a simulated step, equal on all ranks.

    No message depends on a later one, and a stage sends and needs its messages in this order.
    Arguments: see `simulate`. No communication.
    """
    starts = simulate(schedule, num_stages, num_microbatches, num_chunks, forward_only=forward_only).starts
    sent = []
    for stage in range(num_stages):
        steps = action_list(schedule, stage, num_stages, num_microbatches, num_chunks, forward_only=forward_only)
        for step in steps:
            if step.sends is not None and step.sends.receiver != stage:
                duration = _cost(schedule, _EQUAL, step.action.kind) / num_chunks
                sent.append((starts[stage, step.action] + duration, step.sends))
    return tuple(message for _, message in sorted(sent, key=lambda one: (one[0], one[1].sender, one[1].receiver)))


class _Simulation:
    """State of a simulation: progress of each stage, finished actions, and blocked stages."""

    def __init__(
        self, action_lists: Sequence[Sequence[StageAction]], cost: dict[ActionKind, float], message: float
    ) -> None:
        self._action_lists = action_lists
        self._cost = cost
        self._message = message
        self._next = [0] * len(action_lists)
        self._free = [0.0] * len(action_lists)
        self._done: dict[_Result, float] = {}
        self._blocked: dict[_Result, list[int]] = {}
        self._starts: dict[tuple[int, Action], float] = {}

    def starts(self) -> dict[tuple[int, Action], float]:
        # A stage advances until an input is missing, and is resumed by the action that produces it. So each action is
        # visited once, and once more for each input that it had to wait for.
        ready = list(range(len(self._action_lists)))
        while ready:
            self._advance(ready.pop(), ready)
        if any(self._blocked.values()):
            raise ConfigError(self._describe_stuck())
        return self._starts

    def _advance(self, stage: int, ready: list[int]) -> None:
        steps = self._action_lists[stage]
        while self._next[stage] < len(steps):
            step = steps[self._next[stage]]
            start = self._free[stage]
            for result, delay in self._needs(step):
                if result not in self._done:
                    self._blocked.setdefault(result, []).append(stage)
                    return
                start = max(start, self._done[result] + delay)
            end = start + self._cost[step.action.kind]
            self._starts[stage, step.action] = start
            self._free[stage] = end
            self._next[stage] += 1
            result = (step.action.kind, step.action.microbatch, step.position)
            self._done[result] = end
            ready.extend(self._blocked.pop(result, ()))

    def _needs(self, step: StageAction) -> list[tuple[_Result, float]]:
        action = step.action
        needs = []
        if action.kind is ActionKind.BACKWARD:
            needs.append(((ActionKind.FORWARD, action.microbatch, step.position), 0.0))
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            needs.append(((ActionKind.BACKWARD, action.microbatch, step.position), 0.0))
        if step.receives is not None:
            before = step.position + (1 if step.receives.is_gradient else -1)
            delay = self._message if step.receives.sender != step.receives.receiver else 0.0
            needs.append(((action.kind, action.microbatch, before), delay))
        return needs

    def _describe_stuck(self) -> str:
        stuck = [
            f"stage {stage} waits before {self._action_lists[stage][self._next[stage]].action} for {result[0].value} of"
            f" microbatch {result[1]} at position {result[2]}"
            for result, stages in self._blocked.items()
            for stage in stages
        ]
        more = f", and {len(stuck) - _MAX_NAMED} more" if len(stuck) > _MAX_NAMED else ""
        return (
            f"the orders of this schedule wait for each other and never end: {', '.join(stuck[:_MAX_NAMED])}{more}: let"
            " order() put each action behind what it needs, on all stages together"
        )


def _peak(steps: Sequence[StageAction], last: ActionKind) -> int:
    live = peak = 0
    for step in steps:
        live += (step.action.kind is ActionKind.FORWARD) - (step.action.kind is last)
        peak = max(peak, live)
    return peak


_DEPENDS_ON = {ActionKind.BACKWARD: ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT: ActionKind.BACKWARD}


def check_orders(schedule: PipelineSchedule, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Check that a schedule, possibly a user's own, is complete and does not deadlock.

    No communication; the result is the same on every rank.

    Raises:
        ConfigError: The schedule does not support the numbers, its positions are not 0, 1, 2, ..., an order omits or
            repeats an action or has it before its dependencies, or the stages deadlock.
    """
    schedule.check(num_stages, num_microbatches, num_chunks)
    _check_positions(schedule, num_stages, num_chunks)
    kinds = [ActionKind.FORWARD, ActionKind.BACKWARD] + [ActionKind.BACKWARD_WEIGHT] * schedule.defers_weights
    for stage in range(num_stages):
        order = schedule.order(stage, num_stages, num_microbatches, num_chunks)
        where = f"order() of schedule {schedule.name!r} for stage {stage} of {num_stages}"
        _check_complete(where, order, kinds, num_microbatches, num_chunks)
        _check_sequence(where, order)
        forwards = schedule.forward_order(stage, num_stages, num_microbatches, num_chunks)
        _check_complete(f"forward_{where}", forwards, kinds[:1], num_microbatches, num_chunks)
    simulate(schedule, num_stages, num_microbatches, num_chunks)
    simulate(schedule, num_stages, num_microbatches, num_chunks, forward_only=True)


def _check_positions(schedule: PipelineSchedule, num_stages: int, num_chunks: int) -> None:
    places = [(stage, chunk) for stage in range(num_stages) for chunk in range(num_chunks)]
    positions = {place: schedule.position(*place, num_stages) for place in places}
    if sorted(positions.values()) != list(range(len(places))):
        raise ConfigError(
            f"position() of schedule {schedule.name!r} numbers the chunks of {num_stages} stages"
            f" {sorted(positions.values())}, but they are the whole model: number them 0 to {len(places) - 1}, each"
            " once"
        )
    for place, position in positions.items():
        if schedule.place(position, num_stages) != place:
            raise ConfigError(
                f"place() of schedule {schedule.name!r} puts position {position} at (stage, chunk)"
                f" {schedule.place(position, num_stages)}, but position() gives it to {place}: let them agree"
            )


def _check_complete(
    where: str, order: Sequence[Action], kinds: Sequence[ActionKind], num_microbatches: int, num_chunks: int
) -> None:
    counts = Counter(order)
    wanted = [
        Action(k, index, chunk) for k in kinds for chunk in range(num_chunks) for index in range(num_microbatches)
    ]
    known = set(wanted)
    mistakes = {
        "leaves out": [action for action in wanted if action not in counts],
        "repeats": [action for action, count in counts.items() if count > 1],
        "has, beyond what there is to do,": [action for action in counts if action not in known],
    }
    for mistake, actions in mistakes.items():
        if actions:
            each = ", ".join(kind.value for kind in kinds)
            raise ConfigError(
                f"{where} {mistake} {format_list(actions, _MAX_NAMED)}, but a stage does {each} once for each of"
                f" {num_microbatches} microbatches and {num_chunks} chunks: return exactly those"
            )


def _check_sequence(where: str, order: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in order:
        needed = action.kind in _DEPENDS_ON and Action(_DEPENDS_ON[action.kind], action.microbatch, action.chunk)
        if needed and needed not in done:
            raise ConfigError(f"{where} has {action} before {needed}, of which it needs the result: put it behind")
        done.add(action)
