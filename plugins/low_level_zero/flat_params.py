"""Where parameters, buckets and shards lie in a flat buffer: numbers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from booster.interface import Shard, shard_spec_of
from booster.plugins.sharding.masters import follow_weights

# Pieces begin at multiples of 64 bytes in half precision, so that vector instructions find them aligned.
_ALIGNMENT = 32

# Note [Flat layout]
# Parameters lie one after another in a flat buffer, which is padded at its end only. The buffer is cut into buckets,
# and each bucket into as many equal pieces as there are shards: rank r of the shard group owns piece r of every bucket.
# So one reduce-scatter or all-gather moves one bucket, straight from and into the buffers, with the same number of
# bytes on every link. (One contiguous span per rank over the whole buffer would have all ranks send the gradients of
# the last layers to the same rank at the same time.) A rank's pieces, put together, are its shard; piece b begins in it
# at `start / num_shards`. A parameter may reach into several buckets and pieces.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in the flat buffer.

    Attributes:
        shape: Shape of the parameter.
        start: First element in the buffer.
        stop: One past the last.
    """

    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements that are communicated together.

    Attributes:
        start: First element in the buffer.
        stop: One past the last.
        num_shards: Into how many pieces it is cut.
    """

    start: int
    stop: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def piece_numel(self) -> int:
        """Number of elements of a piece."""
        return self.numel // self.num_shards

    @property
    def shard_start(self) -> int:
        """Where the piece begins in the owner's shard."""
        return self.start // self.num_shards

    def piece(self, rank: int) -> slice:
        """Return the part of the buffer that a rank owns."""
        start = self.start + rank * self.piece_numel
        return slice(start, start + self.piece_numel)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank owns of a parameter within one bucket.

    Attributes:
        place: Index of the parameter.
        bucket: Index of the bucket.
        span: Within the row-major flattening of the parameter.
        in_buffer: Within the flat buffer.
        in_piece: Within the rank's piece of the bucket.
    """

    place: int
    bucket: int
    span: tuple[int, int]
    in_buffer: slice
    in_piece: slice


class FlatLayout:
    """See Note [Flat layout].

    Args:
        shapes: Shapes of the parameters, in order.
        num_shards: Ranks that share the buffer.
        max_bucket_numel: Elements of a bucket, at most (but at least one aligned piece per shard).
    """

    def __init__(self, shapes: Sequence[Sequence[int]], num_shards: int, max_bucket_numel: int) -> None:
        self.num_shards = num_shards
        self.places = _places(shapes)
        used = self.places[-1].stop if self.places else 0
        unit = num_shards * _ALIGNMENT
        num_units = -(-used // unit)
        num_buckets = -(-num_units // max(1, max_bucket_numel // unit))
        # As equal as can be: a small rest would be a message of its own.
        cuts = [unit * (num_units * index // max(1, num_buckets)) for index in range(num_buckets + 1)]
        self.numel = num_units * unit
        self.buckets = [Bucket(cuts[i], cuts[i + 1], num_shards) for i in range(num_buckets)]

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.numel // self.num_shards

    def places_in(self, bucket: Bucket) -> list[int]:
        """Return the indices of the parameters that have elements in a bucket."""
        return [
            index
            for index, place in enumerate(self.places)
            if max(place.start, bucket.start) < min(place.stop, bucket.stop)
        ]

    def parts(self, rank: int) -> list[Part]:
        """Return what a rank owns, bucket by bucket."""
        return [
            part
            for number, bucket in enumerate(self.buckets)
            for index in self.places_in(bucket)
            if (part := self._part(number, index, rank)) is not None
        ]

    def _part(self, number: int, index: int, rank: int) -> Part | None:
        place, piece = self.places[index], self.buckets[number].piece(rank)
        start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
        if start >= stop:
            return None
        return Part(
            place=index,
            bucket=number,
            span=(start - place.start, stop - place.start),
            in_buffer=slice(start, stop),
            in_piece=slice(start - piece.start, stop - piece.start),
        )


def _places(shapes: Sequence[Sequence[int]]) -> list[Place]:
    places, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        places.append(Place(tuple(shape), start, stop))
        start = stop
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How weights are cut and kept.

    Attributes:
        num_shards: Ranks that share the weights' updates.
        rank: This one among them.
        is_primary: True where other ranks hold copies of this rank's shards, and this one writes them.
        max_bucket_numel: Elements that are communicated together, at most.
        keeps_masters: Low-precision weights have fp32 masters.
        master_device: Where masters and optimizer states are; None: with the weights.
    """

    num_shards: int
    rank: int
    is_primary: bool
    max_bucket_numel: int
    keeps_masters: bool
    master_device: torch.device | None


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A shard and where it lies."""

    shard: Shard
    part: Part


class FlatGroup:
    """Parameters of one param group and one dtype, as views of one flat buffer.

    Making it re-points the parameters' memory; the `nn.Parameter` objects stay the same ones.

    Args:
        group_index: Index of the param group.
        named: Parameters with their names, in the order in which the model registers them.
        dtype: Dtype of the weights from now on.
        sharding: Sharding of the buffer.

    Attributes:
        weights: The flat buffer, padding included.
        owned: This rank's shards, bucket by bucket.
    """

    def __init__(
        self, group_index: int, named: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, sharding: Sharding
    ) -> None:
        self.group_index = group_index
        self.sharding = sharding
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.dtype = dtype
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self.layout = FlatLayout(shapes, sharding.num_shards, sharding.max_bucket_numel)
        device = self.parameters[0].device
        self.weights = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.masters = self._new_masters(device)
        self.owned = self._own(self.layout.parts(sharding.rank))
        self.note_versions()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.device

    @property
    def rounds_in_place(self) -> bool:
        """Whether an optimizer may write this rank's pieces of the weights while it updates their masters."""
        return self.masters is not None and self.masters.device == self.device

    def weights_of(self, owned: OwnedPart) -> torch.Tensor:
        """Return the weights that a shard is the master of."""
        return self.weights[owned.part.in_buffer]

    def memory_of(self, part: Part) -> torch.Tensor:
        """Return the memory of a shard of this rank: of its master, or of the weights themselves."""
        if self.masters is None:
            return self.weights[part.in_buffer]
        start = self.layout.buckets[part.bucket].shard_start
        return self.masters[start + part.in_piece.start : start + part.in_piece.stop]

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into this rank's pieces of the weights, after a step."""
        if self.masters is None:
            return
        for bucket in self.layout.buckets:
            master = self.masters[bucket.shard_start : bucket.shard_start + bucket.piece_numel]
            self.weights[bucket.piece(self.sharding.rank)].copy_(master, non_blocking=True)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over weights that were changed from outside; see `follow_weights`."""
        if self.masters is not None:
            for owned in self.owned:
                follow_weights(owned.shard)

    def note_versions(self) -> None:
        """Store the weights as they are now; see `changed_outside`."""
        self._versions = [parameter._version for parameter in self.parameters]

    def changed_outside(self) -> bool:
        """Return whether a weight was written in place since `note_versions`, other than through `.data`."""
        return self._versions != [parameter._version for parameter in self.parameters]

    def moved_parameter(self) -> str | None:
        """Return the name of a parameter whose memory is no longer in the flat buffer; None: all are."""
        start, size = self.weights.data_ptr(), self.weights.element_size()
        for name, parameter, place in zip(self.names, self.parameters, self.layout.places, strict=True):
            if parameter.data_ptr() != start + place.start * size and parameter.numel() > 0:
                return name
        return None

    def _new_masters(self, device: torch.device) -> torch.Tensor | None:
        is_low = self.dtype in (torch.float16, torch.bfloat16)
        moves = self.sharding.master_device not in (None, device)
        if not moves and not (is_low and self.sharding.keeps_masters):
            return None
        dtype = torch.float32 if is_low and self.sharding.keeps_masters else self.dtype
        home = device if self.sharding.master_device is None else self.sharding.master_device
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=home)

    @torch.no_grad()
    def _own(self, parts: Sequence[Part]) -> list[OwnedPart]:
        """Move every parameter into the buffer, its exact values into the masters, and make the shards."""
        of_place: dict[int, list[Part]] = {}
        for part in parts:
            of_place.setdefault(part.place, []).append(part)
        owned: dict[tuple[int, int], OwnedPart] = {}
        for index, (parameter, place) in enumerate(zip(self.parameters, self.layout.places, strict=True)):
            exact = parameter.detach().reshape(-1)
            view = self.weights[place.start : place.stop]
            view.copy_(exact)
            for part in of_place.get(index, ()):
                owned[index, part.bucket] = OwnedPart(self._shard(index, part, exact), part)
            parameter.data = view.view(place.shape)  # the old memory goes here, one parameter at a time
            parameter.grad = None
        return [owned[part.place, part.bucket] for part in parts]

    def _shard(self, index: int, part: Part, exact: torch.Tensor) -> Shard:
        memory = self.memory_of(part)
        if self.masters is not None:
            memory.copy_(exact[slice(*part.span)])
        return Shard(
            name=self.names[index],
            global_shape=shard_spec_of(self.parameters[index]).logical_shape,
            span=part.span,
            parameter=nn.Parameter(memory, requires_grad=True),
            model_param=self.parameters[index],
            group_index=self.group_index,
            has_master=self.masters is not None and self.masters.dtype != self.dtype,
            is_primary=self.sharding.is_primary,
        )
