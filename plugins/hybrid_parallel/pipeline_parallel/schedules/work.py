"""What a stage does at a time: one step of one micro-batch through one chunk of the model."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Kind", "Work"]


class Kind(enum.Enum):
    """The three kinds of work.

    `BACKWARD` is the whole backward, but for schedules with `defers_weights`, where it computes the gradients of a
    chunk's inputs alone, which the stage before waits for, and `WEIGHT` those of its weights, which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work on one micro-batch; its text is short: `F3` for chunk 0, `F3.1` for chunk 1.

    Attributes:
        kind: What is computed.
        micro_batch: Which one, from 0 on.
        chunk: With which of the stage's chunks, from 0 on.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
