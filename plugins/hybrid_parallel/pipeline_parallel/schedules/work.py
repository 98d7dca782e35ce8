"""Actions of a schedule: one computation of one microbatch on one model chunk."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Kind", "Work"]


class Kind(enum.Enum):
    """Kind of computation.

    `BACKWARD` is the full backward. For schedules with `defers_weights` it computes only the gradients of a chunk's
    inputs, which the previous stage needs, and `WEIGHT` computes those of its weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Work:
    """An action; its text is `F3` for microbatch 3 on chunk 0, `F3.1` on chunk 1.

    Attributes:
        kind: Kind of computation.
        micro_batch: Index of the microbatch, from 0.
        chunk: Index of the stage's chunk, from 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
