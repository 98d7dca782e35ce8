"""Peak memory of a forward and backward, from activation intervals and the gradients held by a plugin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from booster.interface.memory import MemoryInterval


class HoldsGradients(Protocol):
    """Model of the gradient memory of a plugin during backward."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...

    def receive(self, name: str) -> int:
        """Process the arrival of a gradient; return the peak bytes held meanwhile."""
        ...

    def finish(self) -> int:
        """Process the end of backward; return the peak bytes held meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory at one point of a forward and backward, in bytes.

    Attributes:
        activations: Bytes of activations.
        held: Bytes held by the plugin.
    """

    activations: int
    held: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.activations + self.held


def largest_moment(intervals: Sequence[MemoryInterval], holder: HoldsGradients) -> Moment:
    """Return the point of largest total memory.

    Args:
        intervals: Intervals of a forward and backward.
        holder: Model of the plugin's gradient memory.
    """
    worst = Moment(0, 0)
    for interval in intervals:
        if interval.event == "gradient":
            worst = max(worst, Moment(interval.begin, holder.receive(interval.name)), key=lambda one: one.total)
        worst = max(worst, Moment(interval.activations, holder.num_bytes), key=lambda one: one.total)
    return max(worst, Moment(0, holder.finish()), key=lambda one: one.total)


def cast_bytes(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None) -> int:
    """Return the bytes of tensors after a cast of the floating-point ones to `dtype`; shared memory counts once."""
    found: dict[int, int] = {}
    for one in tensors:
        itemsize = dtype.itemsize if dtype is not None and one.is_floating_point() else one.itemsize
        found[one.untyped_storage()._cdata] = one.untyped_storage().nbytes() // one.itemsize * itemsize
    return sum(found.values())
