"""What is known about the gradient of every parameter and of every bucket in the current window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from booster.plugins.low_level_zero.layout import Bucket, Place
from booster.plugins.low_level_zero.weights import FlatGroup, OwnedPart

__all__ = ["GradientBucket", "Slot", "make_slots"]

# Note [Life of a gradient]
# A gradient *arrives* when autograd has accumulated it into `.grad`. It is *local* until the buckets that it lies in
# are *issued*: handed to a reduce-scatter. When that has ended, this rank holds the *sums* over the ranks of its own
# pieces. What arrives after its bucket was issued in the same backward (a parameter inside of a reentrant activation
# checkpoint arrives twice) stays local, in a `.grad` of its own, until the bucket is issued again.


@dataclass(slots=True, eq=False)
class Slot:
    """The gradient of one parameter.

    Attributes:
        name: The user's name of the parameter.
        parameter: The model's parameter.
        place: Where it lies in its group's flat buffers.
        buckets: The buckets that it reaches into.
        has_arrived: In the current backward.
        is_used: A gradient arrived in this window.
        is_local: Some of it was not reduced yet.
        num_issued: How many of its buckets were issued since the gradient was last complete.
        source: What the buckets that are not issued yet take their part from.
    """

    name: str
    parameter: nn.Parameter
    place: Place
    buckets: list[GradientBucket] = field(default_factory=list)
    has_arrived: bool = False
    is_used: bool = False
    is_local: bool = False
    num_issued: int = 0
    source: torch.Tensor | None = None

    def overlap(self, bucket: Bucket) -> tuple[slice, slice]:
        """Returns the elements that lie in a bucket: within the flattened parameter, and within the bucket."""
        start, stop = max(self.place.start, bucket.start), min(self.place.stop, bucket.stop)
        return (
            slice(start - self.place.start, stop - self.place.start),
            slice(start - bucket.start, stop - bucket.start),
        )


@dataclass(slots=True, eq=False)
class GradientBucket:
    """The gradients of one bucket.

    Attributes:
        group: The flat group that it is part of.
        bucket: Where it lies in the group's buffers.
        slots: The parameters that have elements in it.
        owned: What this rank updates of it, with the parameter's slot.
        num_missing: How many of them have not arrived in the current backward.
        is_issued: It was handed to a reduce-scatter in the current backward.
        sums: This rank's piece, summed over the ranks: what was reduced in this window; None: nothing yet.
    """

    group: FlatGroup
    bucket: Bucket
    slots: list[Slot]
    owned: list[tuple[Slot, OwnedPart]]
    num_missing: int = 0
    is_issued: bool = False
    sums: torch.Tensor | None = None

    @property
    def sum_dtype(self) -> torch.dtype:
        """The format in which gradients are summed: fp32 for low-precision weights."""
        return torch.float32 if self.group.dtype in (torch.float16, torch.bfloat16) else self.group.dtype


def make_slots(
    groups: Iterable[FlatGroup], model_order: Sequence[nn.Parameter]
) -> tuple[list[Slot], list[GradientBucket]]:
    """Returns a slot for every parameter, and all buckets in the order in which backward fills them.

    A bucket is complete when the first of its parameters in the model's order has its gradient, as backward goes from
    the last layer to the first.
    """
    order = {id(parameter): index for index, parameter in enumerate(model_order)}
    slots: list[Slot] = []
    buckets: list[GradientBucket] = []
    for group in groups:
        own = [Slot(*facts) for facts in zip(group.names, group.parameters, group.layout.places, strict=True)]
        slots += own
        owned: dict[int, list[tuple[Slot, OwnedPart]]] = {}
        for one in group.owned:
            owned.setdefault(one.part.bucket, []).append((own[one.part.place], one))
        for number, bucket in enumerate(group.layout.buckets):
            inside = [own[index] for index in group.layout.places_in(bucket)]
            buckets.append(GradientBucket(group, bucket, inside, owned.get(number, [])))
            for slot in inside:
                slot.buckets.append(buckets[-1])
    buckets.sort(key=lambda one: min((order[id(slot.parameter)] for slot in one.slots), default=-1), reverse=True)
    return slots, buckets
