"""Shards of logical tensors: the blocks that a model-parallel rank's parameter holds, and slices of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import nn

from booster.deprecation import DeprecatedAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Offset and length per dim of a block, in elements (`offsets` and `sizes` of DCP)."""

_ATTRIBUTE = "_booster_layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """Shard of a logical tensor in this rank's memory.

    It is a flat range (`span`) of the row-major flattening of a box of the logical tensor; box and span correspond to
    DCP's `offsets`/`sizes` and to DeepSpeed's partitions. A tensor-parallel layer holds a box that is smaller than the
    tensor, with the full box as its span. A ZeRO shard has the full tensor as its box and any span. ZeRO over tensor
    parallelism has both. A replicated tensor is the full box and the full span on every rank, `primary` on one of them.
    Slices contain no padding.

    Attributes:
        name: The user's name of the parameter, buffer or state, without any wrapper's prefix.
        dtype: Dtype of the logical tensor in a checkpoint.
        global_shape: Shape of the logical tensor, in elements.
        box: Offset and length per dim of the block, in elements.
        span: First element and one past the last, in the row-major flattening of the box.
        tensor: The `span[1] - span[0]` elements in that order, on any device or memory tier.
        primary: True on exactly one of the ranks that hold the same elements; that rank writes and counts them.
        shared: Whether all ranks that hold these elements hold the same bits. If True, each of them writes a part. If
            False, the primary rank writes all of them: its values count where ranks differ, as buffers may.
        is_computed: Whether the tensor is not memory of the model, but the result of `get_extra_state` or a hook. Once
            filled, it is given to the modules by `ModelWrapper.load_computed_state`.
    """

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    span: tuple[int, int]
    tensor: torch.Tensor
    primary: bool
    shared: bool = True
    is_computed: bool = False

    def __post_init__(self) -> None:
        if len(self.box) != len(self.global_shape):
            raise ValueError(f"{self.name}: box {self.box} has not one entry per dimension of {self.global_shape}")
        numel = 1
        for (offset, length), size in zip(self.box, self.global_shape, strict=True):
            numel *= length
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(f"{self.name}: box {self.box} reaches outside of shape {self.global_shape}")
        start, stop = self.span
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"{self.name}: span {self.span} reaches outside of a box of {numel} elements")
        if self.tensor.numel() != stop - start:
            raise ValueError(f"{self.name}: span {self.span} does not fit a tensor of {self.tensor.numel()} elements")

    @classmethod
    def full(
        cls, name: str, tensor: torch.Tensor, *, primary: bool, shared: bool = True, is_computed: bool = False
    ) -> TensorSlice:
        """Return the slice of an unsharded tensor."""
        shape = tuple(tensor.shape)
        return cls(
            name=name,
            dtype=tensor.dtype,
            global_shape=shape,
            box=tuple((0, size) for size in shape),
            span=(0, tensor.numel()),
            tensor=tensor,
            primary=primary,
            shared=shared,
            is_computed=is_computed,
        )

    @property
    def box_numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(length for _, length in self.box)

    @property
    def is_full(self) -> bool:
        """Whether this rank holds every element of the logical tensor."""
        return self.span == (0, math.prod(self.global_shape))

    whole = DeprecatedAlias("full")
    is_whole = DeprecatedAlias("is_full")


# Note [Shard specs]
# With model parallelism each rank's parameter is a shard of the user's parameter, the *logical* tensor. The rank's
# *local* tensor consists of blocks of it: one block of a column-parallel weight, three of a fused query, key and value.
# Elements outside of all blocks are padding, and always zero. If ranks hold the same elements, the block is primary on
# one of them, which writes and counts them. The layout is attached to the parameter, so that sharding, clipping, saving
# and loading read it there, whatever parallelism sharded the parameter.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRegion:
    """Block of this rank's tensor, and its position in the logical tensor.

    Attributes:
        local: Box of the block in this rank's tensor.
        logical: Box of the block in the logical tensor, of the same lengths.
        is_primary: True on exactly one of the ranks of a model-parallel group that hold the same elements.
    """

    local: Box
    logical: Box
    is_primary: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Sharding of a parameter; see Note [Shard specs].

    Attributes:
        logical_shape: Shape of the user's parameter.
        local_shape: Shape of this rank's tensor, with padding.
        regions: Blocks, disjoint in the local tensor.
        is_expert: Whether data-parallel ranks hold different shards: the experts of expert parallelism.
        is_counted: Whether norms count the primary blocks; False if another rank of the norm's group holds the same.
    """

    logical_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    regions: tuple[ShardRegion, ...]
    is_expert: bool = False
    is_counted: bool = True

    @classmethod
    def unsharded(cls, shape: Sequence[int], *, is_primary: bool = True) -> ShardSpec:
        """Return the layout of an unsharded parameter."""
        return _unsharded(tuple(shape), is_primary)

    def non_primary(self) -> ShardSpec:
        """Return the same layout without primary blocks: other ranks write and count all elements."""
        return replace(self, regions=tuple(replace(region, is_primary=False) for region in self.regions))

    def experts(self, start: int, stop: int) -> ShardSpec:
        """Return the same layout for some of the experts in dim 0, which is not sharded yet.

        Args:
            start: First expert.
            stop: End of the range, exclusive; an empty range has no regions.
        """
        num_experts = self.logical_shape[0]
        if any(region.logical[0] != (0, num_experts) for region in self.regions):
            raise ValueError(f"dim 0 of {self.logical_shape}, the experts', is sharded already")
        length = stop - start
        return ShardSpec(
            logical_shape=self.logical_shape,
            local_shape=(length, *self.local_shape[1:]),
            regions=tuple(
                replace(one, local=((0, length), *one.local[1:]), logical=((start, length), *one.logical[1:]))
                for one in self.regions
                if length > 0
            ),
            is_expert=True,
        )

    def held_by_expert(self, *, is_held: bool) -> ShardSpec:
        """Return the same layout for a parameter of one expert: with all elements on its rank, none on the others."""
        if is_held:
            return replace(self, is_expert=True)
        nothing = (0, *self.local_shape[1:])
        return ShardSpec(logical_shape=self.logical_shape, local_shape=nothing, regions=(), is_expert=True)

    @property
    def is_unsharded(self) -> bool:
        """Whether this rank's tensor is the logical tensor, in its order."""
        return len(self.regions) == 1 and self.local_shape == self.logical_shape == _lengths(self.regions[0].local)

    @property
    def has_padding(self) -> bool:
        """Whether some elements of this rank's tensor are outside of all blocks."""
        return sum(math.prod(_lengths(region.local)) for region in self.regions) < math.prod(self.local_shape)

    def shard(self, logical: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard of a logical tensor, with zeros as padding."""
        local = logical.new_zeros(self.local_shape)
        for region in self.regions:
            local[_index(region.local)] = logical[_index(region.logical)]
        return local

    def owned(self, tensor: torch.Tensor, span: tuple[int, int]) -> list[torch.Tensor]:
        """Return views of the counted elements of a flat range of this rank's tensor: each is on one rank of a norm.

        Args:
            tensor: 1-D tensor of the elements of the flat range.
            span: First element and one past the last, in the row-major flattening of this rank's tensor.
        """
        regions = [region for region in self.regions if region.is_primary and self.is_counted]
        if len(regions) == len(self.regions) and not self.has_padding:
            return [tensor]
        return [view for region in regions for view, _ in _overlaps(region, self.local_shape, tensor, span)]

    def slices(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        span: tuple[int, int] | None = None,
        primary: bool = True,
        shared: bool = True,
    ) -> list[TensorSlice]:
        """Return this rank's slices of a logical tensor that has one value per element of the parameter.

        Args:
            name: Name of the logical tensor.
            tensor: This rank's values, in the local shape or as the 1-D elements of `span`. The slices' tensors are
                views of it, some of which may be strided.
            span: First element and one past the last, in the row-major flattening of this rank's tensor; optional,
                defaults to all.
            primary: Whether this rank is the one that writes, among those that hold the same shard.
            shared: Value of `TensorSlice.shared`.
        """
        span = (0, tensor.numel()) if span is None else span
        if self.is_unsharded:
            parts = [(self.regions[0], tensor, self.regions[0].logical, span)]
        else:
            flat = tensor.view(-1)
            parts = [
                (region, view, box, (0, view.numel()))
                for region in self.regions
                for view, box in _overlaps(region, self.local_shape, flat, span)
            ]
        return [
            TensorSlice(
                name=name,
                dtype=part.dtype,
                global_shape=self.logical_shape,
                box=box,
                span=span_of_box,
                tensor=part,
                primary=primary and region.is_primary,
                shared=shared,
            )
            for region, part, box, span_of_box in parts
        ]

    def holds_first(self, span: tuple[int, int] | None = None) -> bool:
        """Return whether a flat range of this rank's tensor, by default all, has the logical tensor's first element.

        The element must be primary. For an empty logical tensor it is True on one of the ranks.
        """
        span = (0, max(1, math.prod(self.local_shape))) if span is None else span
        if math.prod(self.logical_shape) == 0:
            return span[0] == 0 and all(region.is_primary for region in self.regions)
        for region in self.regions:
            if (
                region.is_primary
                and all(offset == 0 for offset, _ in region.logical)
                and 0 not in _lengths(region.local)
            ):
                first = _flat_index([offset for offset, _ in region.local], self.local_shape)
                return span[0] <= first < span[1]
        return False

    def positions(self, span: tuple[int, int]) -> torch.Tensor:
        """Return the indices in the logical tensor's row-major flattening of a flat range of this rank's tensor.

        Args:
            span: First element and one past the last, in the row-major flattening of this rank's tensor.

        Returns:
            1-D int64 tensor; -1 for padding.
        """
        numbers = torch.arange(math.prod(self.logical_shape)).view(self.logical_shape)
        local = torch.full(self.local_shape, -1)
        for region in self.regions:
            local[_index(region.local)] = numbers[_index(region.logical)]
        return local.view(-1)[slice(*span)]


@lru_cache(maxsize=4096)  # a model has few shapes, and saves and loads ask for each parameter's several times
def _unsharded(shape: tuple[int, ...], is_primary: bool) -> ShardSpec:
    box = tuple((0, size) for size in shape)
    region = ShardRegion(local=box, logical=box, is_primary=is_primary)
    return ShardSpec(logical_shape=shape, local_shape=shape, regions=(region,))


def shard_spec_of(parameter: torch.Tensor, shape: Sequence[int] | None = None) -> ShardSpec:
    """Return the layout of a parameter; without an attached one it is unsharded.

    Args:
        parameter: The model's parameter.
        shape: Shape of an unsharded parameter; optional, defaults to the parameter's.
    """
    layout = getattr(parameter, _ATTRIBUTE, None)
    return ShardSpec.unsharded(parameter.shape if shape is None else shape) if layout is None else layout


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has an attached layout."""
    return hasattr(parameter, _ATTRIBUTE)


def set_shard_spec(parameter: nn.Parameter, shard_spec: ShardSpec) -> None:
    """Attach a layout to a parameter."""
    if tuple(parameter.shape) != shard_spec.local_shape:
        raise ValueError(f"a layout of {shard_spec.local_shape} does not match a parameter of {tuple(parameter.shape)}")
    setattr(parameter, _ATTRIBUTE, shard_spec)


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(length for _, length in box)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in box)


def _flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for one, size in zip(index, shape, strict=True):
        position = position * size + one
    return position


def _overlaps(
    region: ShardRegion, local_shape: tuple[int, ...], flat: torch.Tensor, span: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield the intersection of a flat range of the local tensor with a block: views, and their logical boxes.

    A flat range is a few boxes: some of the first row, complete rows, some of the last row, and so on in the lower
    dims. The intersection of each of them with the block is a box.
    """
    for box in _boxes(local_shape, *span):
        intersection = []
        for (start, length), (other_start, other_length) in zip(box, region.local, strict=True):
            first = max(start, other_start)
            intersection.append((first, min(start + length, other_start + other_length) - first))
        if any(length <= 0 for _, length in intersection):
            continue
        inside = flat[_flat_index([offset for offset, _ in box], local_shape) - span[0] :]
        view = inside[: math.prod(_lengths(box))].view(_lengths(box))
        within = tuple((offset - start, length) for (offset, length), (start, _) in zip(intersection, box, strict=True))
        logical = tuple(
            (offset - start + target, length)
            for (offset, length), (start, _), (target, _) in zip(
                intersection, region.local, region.logical, strict=True
            )
        )
        yield view[_index(within)], logical


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, in order, of a flat range of the row-major flattening of a shape."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    full = tuple((0, size) for size in shape[1:])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # inside of one row
        yield from (((last, 1), *box) for box in _boxes(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from (((first - 1, 1), *box) for box in _boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield ((first, last - first), *full)
    if last * row < stop:
        yield from (((last, 1), *box) for box in _boxes(shape[1:], 0, stop - last * row))
