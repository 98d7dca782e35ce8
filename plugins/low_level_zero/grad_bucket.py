"""What is known about the gradient of every parameter and of every bucket in the current window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from booster.comm import ReduceScatter

from .flat_params import Bucket, FlatGroup, OwnedPart, Place

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
        place: Region in its group's flat buffers.
        buckets: The buckets that it reaches into.
        has_arrived: Whether it has arrived in the current backward.
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
        """Return the elements that lie in a bucket: within the flattened parameter, and within the bucket."""
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
        bucket: Region in the group's buffers.
        slots: The parameters that have elements in it.
        owned: Elements that this rank updates, with the parameter's slot.
        num_missing: Number of gradients that have not arrived in the current backward.
        is_issued: Whether it was handed to a reduce-scatter in the current backward.
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
    """Return a slot for every parameter, and all buckets in the order in which backward fills them.

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


class Scratch:
    """Buffers that are kept from step to step: memory that is touched for the first time is many times slower.

    Args:
        num_buckets: Maximum number of buckets in flight.
    """

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._buffers: dict[tuple[str, int, torch.dtype, torch.device], torch.Tensor] = {}
        self._turn = 0

    def next_bucket(self) -> None:
        """Turn to the buffers of the bucket that was in flight longest; it must have ended."""
        self._turn = (self._turn + 1) % self._num_buckets

    def take(
        self, what: str, numel: int, dtype: torch.dtype, device: torch.device, *, per_bucket: bool = True
    ) -> torch.Tensor:
        """Return a buffer with any content, of the current bucket or (`per_bucket=False`) one for all."""
        key = (what, self._turn if per_bucket else 0, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel]


class GradientStore(Protocol):
    """The gradients of one flat group; see Note [Life of a gradient]."""

    def receive(self, slot: Slot) -> None:
        """Take a gradient that has arrived in `.grad`."""
        ...

    def payload(self, bucket: GradientBucket, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's local gradients to be sent, and release those that no other bucket needs."""
        ...

    def collect(self, bucket: GradientBucket, flight: ReduceScatter) -> None:
        """Wait for the reduce-scatter and add its result to the bucket's sums."""
        ...

    def evict_for(self, bucket: GradientBucket) -> None:
        """Move the sums to where further local gradients do not overwrite them."""
        ...

    def zero_sums(self, bucket: GradientBucket) -> None:
        """Make the bucket's sums zeros, whatever they were."""
        ...

    def local(self, slot: Slot) -> torch.Tensor | None:
        """Return the gradient that was not reduced yet, in the parameter's shape; None if there is none."""
        ...

    def forget(self, slots: Sequence[Slot]) -> None:
        """Release the local gradients of these parameters."""
        ...


class PackedGradients:
    """Stage 2: gradients stay in `.grad` until their bucket is issued; only the sums of the own pieces are kept.

    The sums live from backward to the end of the window: the next forward's activations may take their memory.

    Args:
        group: Flat param group of the gradients.
        scratch: Buffers for buckets in flight.
    """

    def __init__(self, group: FlatGroup, scratch: Scratch) -> None:
        self._device = group.device
        self._scratch = scratch

    def receive(self, slot: Slot) -> None:
        """Leave the gradient in `.grad`."""

    def payload(self, bucket: GradientBucket, dtype: torch.dtype) -> torch.Tensor:
        where = bucket.bucket
        buffer = self._scratch.take("sent", where.numel, dtype, bucket.group.device)
        targets, sources = [], []
        for slot in bucket.slots:
            if slot.num_issued == 0:
                # Taken out of `.grad`: what arrives from now on must not be added to what was sent in part.
                slot.source, slot.parameter.grad, slot.is_local = slot.parameter.grad, None, False
            in_parameter, in_bucket = slot.overlap(where)
            if slot.source is None:
                buffer[in_bucket].zero_()
            elif slot.source.is_sparse:
                buffer[in_bucket].copy_(slot.source.to_dense().reshape(-1)[in_parameter])
            else:
                targets.append(buffer[in_bucket])
                sources.append(slot.source.reshape(-1)[in_parameter])
            slot.num_issued += 1
            if slot.num_issued == len(slot.buckets):
                slot.num_issued, slot.source = 0, None
        if targets:
            torch._foreach_copy_(targets, sources)
        _zero_padding(buffer, bucket)
        return buffer

    def collect(self, bucket: GradientBucket, flight: ReduceScatter) -> None:
        accumulates = bucket.sums is not None
        if bucket.sums is None:
            bucket.sums = torch.empty(bucket.bucket.piece_numel, dtype=bucket.sum_dtype, device=self._device)
        flight.wait(bucket.sums, accumulate=accumulates)

    def evict_for(self, bucket: GradientBucket) -> None:
        """Do nothing: sums and local gradients never share memory."""

    def zero_sums(self, bucket: GradientBucket) -> None:
        bucket.sums = torch.zeros(bucket.bucket.piece_numel, dtype=bucket.sum_dtype, device=self._device)

    def local(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.grad if slot.is_local else None

    def forget(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.parameter.grad = slot.source = None
            slot.num_issued = 0


class FullGradients:
    """Stage 1: local gradients in a flat buffer of which every `.grad` is a view; reduced in place.

    The sums of a bucket take the place of its local gradients: for weights in low precision the fp32 sums of one piece
    need no more bytes than the whole bucket had, as there are at least two pieces.

    Args:
        group: Flat param group of the gradients.
        scratch: Buffers for buckets in flight.
    """

    def __init__(self, group: FlatGroup, scratch: Scratch) -> None:
        self._group = group
        self._flat = torch.zeros(group.layout.numel, dtype=group.dtype, device=group.device)
        self._rank = group.sharding.rank
        self._views: dict[int, torch.Tensor] = {}
        self._scratch = scratch

    def receive(self, slot: Slot) -> None:
        view, gradient = self._view(slot), slot.parameter.grad
        if gradient is None or gradient is view:
            return
        if gradient.is_sparse:
            view.zero_().add_(gradient)
        else:
            view.copy_(gradient)
        slot.parameter.grad = view

    def payload(self, bucket: GradientBucket, dtype: torch.dtype) -> torch.Tensor:
        where = bucket.bucket
        local = self._flat[where.start : where.stop]
        for slot in bucket.slots:
            if slot.num_issued == 0:
                slot.source, slot.is_local = self._take(slot), False
            if slot.source is None:
                local[slot.overlap(where)[1]].zero_()
            slot.num_issued += 1
            if slot.num_issued == len(slot.buckets):
                slot.num_issued, slot.source = 0, None
        _zero_padding(local, bucket)
        if dtype == local.dtype:
            return local
        return self._scratch.take("sent", where.numel, dtype, local.device).copy_(local)

    def collect(self, bucket: GradientBucket, flight: ReduceScatter) -> None:
        if bucket.sums is not None:
            flight.wait(bucket.sums, accumulate=True)
            return
        bucket.sums = self._in_place(bucket)
        if bucket.sums.dtype == self._flat.dtype:
            flight.wait(bucket.sums, accumulate=False)
            return
        numel = bucket.bucket.piece_numel
        sums = self._scratch.take("sums", numel, bucket.sum_dtype, self._flat.device, per_bucket=False)
        flight.wait(sums, accumulate=False)  # not straight into place: it would overwrite what is being summed
        bucket.sums.copy_(sums)

    def evict_for(self, bucket: GradientBucket) -> None:
        if bucket.sums is not None and bucket.sums.data_ptr() == self._in_place(bucket).data_ptr():
            bucket.sums = bucket.sums.clone()

    def zero_sums(self, bucket: GradientBucket) -> None:
        bucket.sums = torch.zeros(bucket.bucket.piece_numel, dtype=bucket.sum_dtype, device=self._flat.device)

    def local(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.grad if slot.is_local else None

    def forget(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.parameter.grad = slot.source = None
            slot.num_issued = 0

    def _take(self, slot: Slot) -> torch.Tensor | None:
        """Return the slot's gradient if it has one, taken out of `.grad`: what arrives later must not be added."""
        if slot.parameter.grad is None:
            return None
        self.receive(slot)  # one that arrived outside of booster.backward, or late
        slot.parameter.grad = None
        return self._view(slot)

    def _view(self, slot: Slot) -> torch.Tensor:
        key = id(slot)
        if key not in self._views:
            self._views[key] = self._flat[slot.place.start : slot.place.stop].view(slot.place.shape)
        return self._views[key]

    def _in_place(self, bucket: GradientBucket) -> torch.Tensor:
        where = bucket.bucket
        if bucket.sum_dtype == self._flat.dtype:
            return self._flat[where.piece(self._rank)]
        return self._flat[where.start : where.stop].view(bucket.sum_dtype)[: where.piece_numel]


def _zero_padding(buffer: torch.Tensor, bucket: GradientBucket) -> None:
    end = bucket.group.layout.places[-1].stop
    if bucket.bucket.stop > end:
        buffer[max(0, end - bucket.bucket.start) :].zero_()
