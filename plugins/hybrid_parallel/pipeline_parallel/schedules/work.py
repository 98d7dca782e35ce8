"""Actions of a schedule: one computation of one microbatch on one model chunk."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Action", "ActionKind"]


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
        micro_batch: Index of the microbatch, from 0.
        chunk: Index of the stage's chunk, from 0.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")
