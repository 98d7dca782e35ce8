"""What estimates of memory share: what follows the course of a forward and backward, and which moment is the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from booster.interface.memory import MemoryInterval

LOW_PRECISION = (torch.float16, torch.bfloat16)


class HoldsGradients(Protocol):
    """Who says what is done with gradients as they arrive."""

    @property
    def num_bytes(self) -> int:
        """What it holds now."""
        ...

    def receive(self, name: str) -> int:
        """Take the gradient of a parameter; returns the most bytes until all is done that follows from it."""
        ...

    def finish(self) -> int:
        """Called when backward has ended; returns as `receive` does."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a forward and backward, in bytes.

    Attributes:
        activations: Then.
        held: Of what the plugin holds and lets go.
    """

    activations: int
    held: int

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.held


def largest_moment(course: Sequence[MemoryInterval], holder: HoldsGradients) -> Moment:
    """Return the moment at which activations and what a plugin holds take the most together.

    Args:
        course: Intervals of a forward and backward.
        holder: Told about every gradient, in the order of time.
    """
    worst = Moment(0, 0)
    for stretch in course:
        if stretch.event == "gradient":
            worst = max(worst, Moment(stretch.begin, holder.receive(stretch.name)), key=lambda one: one.total)
        worst = max(worst, Moment(stretch.activations, holder.num_bytes), key=lambda one: one.total)
    return max(worst, Moment(0, holder.finish()), key=lambda one: one.total)


def cast_bytes(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None) -> int:
    """Return the bytes of tensors when floating ones are in a format (None: in their own), shared memory once."""
    found: dict[int, int] = {}
    for one in tensors:
        itemsize = dtype.itemsize if dtype is not None and one.is_floating_point() else one.itemsize
        found[one.untyped_storage()._cdata] = one.untyped_storage().nbytes() // one.itemsize * itemsize
    return sum(found.values())
