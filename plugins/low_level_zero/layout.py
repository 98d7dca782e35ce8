"""Where parameters, buckets and shards lie in a flat buffer: numbers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bucket", "FlatLayout", "Part", "Place"]

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
        shape: Of the parameter.
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
        """Returns the part of the buffer that a rank owns."""
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
        shapes: Of the parameters, in the order in which they lie.
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
        """Returns the indices of the parameters that have elements in a bucket."""
        return [
            index
            for index, place in enumerate(self.places)
            if max(place.start, bucket.start) < min(place.stop, bucket.stop)
        ]

    def parts(self, rank: int) -> list[Part]:
        """Returns what a rank owns, bucket by bucket."""
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
