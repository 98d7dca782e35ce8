"""States of a parameter between two steps, and the legal transitions."""

from __future__ import annotations

from enum import Enum

__all__ = ["TensorState", "checked_transition"]


class TensorState(Enum):
    """State of a parameter in its chunk.

    FREE: sharded, this rank holds its shard only. HOLD: gathered and idle. COMPUTE: gathered, and a module that uses
    the weights is running. HOLD_AFTER_BWD: the gradient has arrived in `.grad`, and this backward no longer needs the
    weights. READY_FOR_REDUCE: the gradient is in the chunk's gradient buffer.
    """

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_BWD = "hold_after_backward"
    READY_FOR_REDUCE = "ready_for_reduce"


# A gradient may arrive while the weights are sharded: an embedding's backward does not read them. Weights whose
# gradient is complete may be read again, by a retained graph or by a second use behind a detach().
_LEGAL: dict[TensorState, frozenset[TensorState]] = {
    TensorState.FREE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD: frozenset({TensorState.COMPUTE, TensorState.FREE, TensorState.HOLD_AFTER_BWD}),
    TensorState.COMPUTE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD_AFTER_BWD: frozenset({TensorState.READY_FOR_REDUCE}),
    TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD_AFTER_BWD, TensorState.HOLD, TensorState.FREE}),
}


def checked_transition(name: str, before: TensorState, after: TensorState) -> TensorState:
    """Return `after` if the transition is legal.

    Args:
        name: Name of the parameter.
        before: Current state.
        after: Next state. An unchanged state is always legal.

    Raises:
        RuntimeError: The transition is illegal, which is a bug of this package.
    """
    if after is not before and after not in _LEGAL[before]:
        raise RuntimeError(f"parameter {name!r} can't go from {before.name} to {after.name}")
    return after
