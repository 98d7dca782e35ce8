"""Layout of parameters, buckets and shards in a flat buffer, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from booster.comm import fake, sum_dtype
from booster.core.shard_aware import update_master
from booster.interface import Shard, shard_spec_of
from booster.plugins.sharding.config import ShardGroups, ZeroConfig
from booster.plugins.sharding.pinned_memory import PinnedMemory

# Shards start at multiples of 64 bytes in half precision, aligned for vector instructions.
_ALIGNMENT = 32
# Parameters start at multiples of 16 bytes in half precision: CUDA's grouped products reject other addresses.
_PARAM_ALIGNMENT = 8

# Note [Flat layout]
# Parameters follow each other in a flat buffer; padding aligns the start of each and fills the last bucket, and has
# gradients of zero. The buffer consists of buckets, and each bucket of `num_shards` equal shards: rank r of the shard
# group owns shard r of every bucket. One reduce-scatter or all-gather therefore moves one bucket without a copy, with
# the same number of bytes on every link. (With one contiguous shard per rank, all ranks would send the gradients of the
# last layers to the same rank at the same time.)
# The concatenation of a rank's bucket shards is its shard of the buffer; the one of a bucket starts at
# `bucket.start / num_shards`. A parameter may cover several buckets and shards.


@dataclass(frozen=True, slots=True)
class ParamRange:
    """Range of a parameter in the flat buffer.

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
    """Elements that are reduced or gathered together.

    Attributes:
        start: First element in the buffer.
        stop: One past the last.
        num_shards: Number of equal shards.
    """

    start: int
    stop: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def shard_numel(self) -> int:
        """Number of elements of a shard."""
        return self.numel // self.num_shards

    @property
    def offset_in_shard(self) -> int:
        """First element in the owner's shard of the buffer."""
        return self.start // self.num_shards

    def shard_range(self, rank: int) -> slice:
        """Return the range of the buffer that a rank owns."""
        start = self.start + rank * self.shard_numel
        return slice(start, start + self.shard_numel)


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements of a parameter that a rank owns in one bucket.

    Attributes:
        param: Index of the parameter.
        bucket: Index of the bucket.
        span: Range in the row-major flattening of the parameter.
        in_buffer: Range in the flat buffer.
        range_in_shard: Range in the rank's shard of the bucket.
    """

    param: int
    bucket: int
    span: tuple[int, int]
    in_buffer: slice
    range_in_shard: slice


class FlatLayout:
    """Layout of a flat buffer; see Note [Flat layout].

    Args:
        shapes: Shapes of the parameters, in order.
        num_shards: Number of ranks that share the buffer.
        max_bucket_numel: Maximum number of elements of a bucket (but at least one aligned unit per shard).

    Attributes:
        numel: Number of elements, including padding.
        shard_numel: Number of elements that each rank owns, including padding.
        param_ranges: Ranges of the parameters, in order.
        padding: Ranges of elements that belong to no parameter, in order.
        buckets: Buckets of equal size up to one unit, in buffer order.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], num_shards: int, max_bucket_numel: int) -> None:
        self.num_shards = num_shards
        self.param_ranges: list[ParamRange] = []
        used = 0
        for shape in shapes:
            start = -(-used // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT
            used = start + math.prod(shape)
            self.param_ranges.append(ParamRange(tuple(shape), start, used))
        unit = num_shards * _ALIGNMENT
        num_units = -(-used // unit)
        num_buckets = -(-num_units // max(1, max_bucket_numel // unit))
        # Equal sizes: a small last bucket would cost a separate message.
        cuts = [unit * (num_units * index // max(1, num_buckets)) for index in range(num_buckets + 1)]
        self.numel = num_units * unit
        starts = [*(one.start for one in self.param_ranges), self.numel]
        stops = [0, *(one.stop for one in self.param_ranges)]
        self.padding = [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]
        self.shard_numel = self.numel // num_shards
        self.buckets = [Bucket(cuts[i], cuts[i + 1], num_shards) for i in range(num_buckets)]

    def params_in(self, bucket: Bucket) -> list[int]:
        """Return the indices of the parameters that have elements in a bucket."""
        return [
            index
            for index, param_range in enumerate(self.param_ranges)
            if max(param_range.start, bucket.start) < min(param_range.stop, bucket.stop)
        ]

    def padding_in(self, bucket: Bucket) -> list[slice]:
        """Return the ranges of a bucket, relative to its start, that belong to no parameter."""
        return [
            slice(max(start, bucket.start) - bucket.start, min(stop, bucket.stop) - bucket.start)
            for start, stop in self.padding
            if max(start, bucket.start) < min(stop, bucket.stop)
        ]

    def owned_ranges(self, rank: int) -> list[OwnedRange]:
        """Return the ranges that a rank owns, in bucket order."""
        return [
            owned_range
            for number, bucket in enumerate(self.buckets)
            for index in self.params_in(bucket)
            if (owned_range := self._owned_range(number, index, rank)) is not None
        ]

    def _owned_range(self, number: int, index: int, rank: int) -> OwnedRange | None:
        param_range, shard = self.param_ranges[index], self.buckets[number].shard_range(rank)
        start, stop = max(param_range.start, shard.start), min(param_range.stop, shard.stop)
        if start >= stop:
            return None
        return OwnedRange(
            param=index,
            bucket=number,
            span=(start - param_range.start, stop - param_range.start),
            in_buffer=slice(start, stop),
            range_in_shard=slice(start - shard.start, stop - shard.start),
        )


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard and its range."""

    shard: Shard
    range: OwnedRange


class FlatGroup:
    """Parameters of one param group and dtype as views of one flat buffer.

    The constructor moves the parameters' data into the buffer; the `nn.Parameter` objects stay the same.

    Args:
        group_index: Index of the param group.
        named: Parameters with their names, in the model's registration order.
        dtype: New dtype of the weights.
        config: Options of ZeRO.
        groups: Ranks that share the buffer.

    Attributes:
        weights: Flat buffer, including padding.
        device: Device of the weights.
        pinned: Pinned memory of what is copied to and from offloaded masters; None if they are not offloaded.
        masters: This rank's shard with the precision of the update, or None if the optimizer updates the weights.
        updates_weights_in_place: Whether a fused optimizer step may write this rank's weights together with their
            masters.
        owned: Shards of this rank, in bucket order.
    """

    def __init__(
        self,
        group_index: int,
        named: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        config: ZeroConfig,
        groups: ShardGroups,
    ) -> None:
        self.group_index = group_index
        self.groups = groups
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.dtype = dtype
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        max_bucket_numel = config.max_bucket_numel
        if fake.max_buckets is not None:
            numel = sum(parameter.numel() for _, parameter in named)
            max_bucket_numel = max(max_bucket_numel, numel // fake.max_buckets)
        self.layout = FlatLayout(shapes, groups.num_shards, max_bucket_numel)
        self.device = self.parameters[0].device
        self.weights = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
        self.masters = self._new_masters(config)
        self.pinned = PinnedMemory() if self.is_offloaded else None
        self._pinned_weights: dict[int, torch.Tensor] = {}
        self.updates_weights_in_place = self.masters is not None and not self.is_offloaded
        self.owned = self._flatten(self.layout.owned_ranges(groups.rank))
        self.record_versions()

    @property
    def is_offloaded(self) -> bool:
        """Whether the masters are in host memory beside an accelerator."""
        return self.masters is not None and self.masters.device != self.device

    def shard_storage(self, owned_range: OwnedRange) -> torch.Tensor:
        """Return the memory that the optimizer updates: the master weights, or the weights if there are none."""
        if self.masters is None:
            return self.weights[owned_range.in_buffer]
        start = self.layout.buckets[owned_range.bucket].offset_in_shard
        return self.masters[start + owned_range.range_in_shard.start : start + owned_range.range_in_shard.stop]

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copy the masters into this rank's shards of the weights, after a step."""
        if self.masters is None:
            return
        for index, (bucket, master, weights) in enumerate(self._own_shards(self.masters)):
            if self.is_offloaded:
                master = self._weights_to_send(index, bucket).copy_(master)
            weights.copy_(master, non_blocking=True)

    def _own_shards(self, masters: torch.Tensor) -> Iterator[tuple[Bucket, torch.Tensor, torch.Tensor]]:
        """Yield the buckets, with the masters and the weights of this rank's shard."""
        for bucket in self.layout.buckets:
            start = bucket.offset_in_shard
            yield (
                bucket,
                masters[start : start + bucket.shard_numel],
                self.weights[bucket.shard_range(self.groups.rank)],
            )

    def _weights_to_send(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Return pinned memory for weights that are copied to the accelerator, so that the host does not wait.

        It may be overwritten in a step: the wait for that step's gradients is behind the copies of the last one.
        """
        if index not in self._pinned_weights:
            assert self.pinned is not None
            memory = self.pinned.allocate(bucket.shard_numel * self.dtype.itemsize).memory
            self._pinned_weights[index] = memory.view(self.dtype)
        return self._pinned_weights[index]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copy externally changed weights into the masters; see `update_master`."""
        if self.masters is not None:
            for _, master, weights in self._own_shards(self.masters):
                update_master(master, weights)

    def record_versions(self) -> None:
        """Record the version counters of the weights; see `follow_weights`."""
        self._versions = [parameter._version for parameter in self.parameters]

    def follow_weights(self) -> None:
        """Copy weights that were written since the last step into the masters.

        Values are compared, as a write through `.data` changes no version counter. Not those of offloaded masters, for
        which all weights would be moved to the host: they only follow writes that change one.
        """
        if not self.is_offloaded or self._versions != [parameter._version for parameter in self.parameters]:
            self.refresh_masters()

    def _new_masters(self, config: ZeroConfig) -> torch.Tensor | None:
        dtype = sum_dtype(self.dtype) if config.master_weights else self.dtype
        home = torch.device("cpu") if config.cpu_offload else self.device
        if dtype == self.dtype and home == self.device:
            return None
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=home)

    @torch.no_grad()
    def _flatten(self, owned_ranges: Sequence[OwnedRange]) -> list[OwnedShard]:
        """Move every parameter into the buffer and its unrounded values into the masters; return the shards."""
        ranges_of: dict[int, list[OwnedRange]] = {}
        for owned_range in owned_ranges:
            ranges_of.setdefault(owned_range.param, []).append(owned_range)
        owned: dict[tuple[int, int], OwnedShard] = {}
        for index, (parameter, param_range) in enumerate(zip(self.parameters, self.layout.param_ranges, strict=True)):
            values = parameter.detach().reshape(-1)
            view = self.weights[param_range.start : param_range.stop]
            view.copy_(values)
            for owned_range in ranges_of.get(index, ()):
                owned[index, owned_range.bucket] = OwnedShard(self._shard(index, owned_range, values), owned_range)
            parameter.data = view.view(param_range.shape)  # frees the old memory, one parameter at a time
            parameter.grad = None
        return [owned[owned_range.param, owned_range.bucket] for owned_range in owned_ranges]

    def _shard(self, index: int, owned_range: OwnedRange, values: torch.Tensor) -> Shard:
        memory = self.shard_storage(owned_range)
        if self.masters is not None:
            memory.copy_(values[slice(*owned_range.span)])
        return Shard(
            name=self.names[index],
            global_shape=shard_spec_of(self.parameters[index]).logical_shape,
            span=owned_range.span,
            parameter=nn.Parameter(memory, requires_grad=True),
            model_param=self.parameters[index],
            group_index=self.group_index,
            has_master=self.masters is not None and self.masters.dtype != self.dtype,
            is_primary=self.groups.is_primary,
        )
