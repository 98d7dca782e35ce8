"""Where a parameter stands between two steps, and what may follow on what."""

from __future__ import annotations

from enum import Enum

__all__ = ["TensorState", "checked_transition"]


class TensorState(Enum):
    """What a chunk's payload holds in a parameter's place.

    FREE: nothing, this rank has its piece of the weights alone. HOLD: the weights, which no operator uses now.
    COMPUTE: the weights, and a module that uses them is running. HOLD_AFTER_BWD: the gradient has arrived in `.grad`,
    and this backward needs the weights no more. READY_FOR_REDUCE: the gradient is in the chunk's gradient buffer.
    """

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_BWD = "hold_after_backward"
    READY_FOR_REDUCE = "ready_for_reduce"


# A gradient may arrive while the weights are not there: an embedding's backward never looks at them. And weights whose
# gradient is complete may be asked for again, by a graph that was retained or a second use behind a detach().
_LEGAL: dict[TensorState, frozenset[TensorState]] = {
    TensorState.FREE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD: frozenset({TensorState.COMPUTE, TensorState.FREE, TensorState.HOLD_AFTER_BWD}),
    TensorState.COMPUTE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD_AFTER_BWD: frozenset({TensorState.READY_FOR_REDUCE}),
    TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD_AFTER_BWD, TensorState.HOLD, TensorState.FREE}),
}


def checked_transition(name: str, before: TensorState, after: TensorState) -> TensorState:
    """Returns the new state of a parameter.

    Args:
        name: Of the parameter.
        before: Its state.
        after: The state that is to follow; the same one is always allowed.

    Raises:
        RuntimeError: `after` can't follow on `before`: a bug of this package.
    """
    if after is not before and after not in _LEGAL[before]:
        raise RuntimeError(f"parameter {name!r} can't go from {before.name} to {after.name}")
    return after
