"""Validation of schedules: complete, without repetitions, and free of deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.schedule import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.simulation import simulate
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Action, ActionKind

__all__ = ["check_orders"]

_MAX_NAMED = 8  # works in a message: more wouldn't be read
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
                f"{where} {mistake} {_listed(actions)}, but a stage does {each} once for each of {num_microbatches}"
                f" microbatches and {num_chunks} chunks: return exactly those"
            )


def _check_sequence(where: str, order: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in order:
        needed = action.kind in _DEPENDS_ON and Action(_DEPENDS_ON[action.kind], action.microbatch, action.chunk)
        if needed and needed not in done:
            raise ConfigError(f"{where} has {action} before {needed}, of which it needs the result: put it behind")
        done.add(action)


def _listed(actions: Sequence[Action]) -> str:
    more = f" and {len(actions) - _MAX_NAMED} more" if len(actions) > _MAX_NAMED else ""
    return ", ".join(map(str, actions[:_MAX_NAMED])) + more
