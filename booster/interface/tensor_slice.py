"""Which part of which logical tensor a rank holds: the one description that all layouts share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["TensorSlice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A part of a logical tensor that this rank holds in memory.

    The part is a span of the row-major flattening of a box of the logical tensor. A tensor-parallel layer holds a box
    that is smaller than the tensor, with the whole box as its span; a ZeRO shard holds the whole tensor as its box and
    a span that may begin and end in the middle; ZeRO over tensor parallelism holds both. A replicated tensor is the
    whole box and the whole span on every rank, `primary` on one of them. Padding never appears in a slice.

    Attributes:
        name: The user's own name of the parameter, buffer or state, without any wrapper's prefix.
        dtype: Number format of the logical tensor in a checkpoint.
        global_shape: Shape of the logical tensor, in elements.
        box: Per dimension the offset and the length of the block, in elements.
        span: First element and one past the last, counted in the row-major flattening of the box.
        tensor: What this rank holds: `span[1] - span[0]` elements in that order, on any device or memory tier.
        primary: True on exactly one of the ranks that hold the same elements; that rank writes and counts them.
        shared: Every rank that holds these elements holds them bit for bit alike, so they may divide the writing among
            themselves. False: only the primary's count, as with buffers, which may drift apart.
    """

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    span: tuple[int, int]
    tensor: torch.Tensor
    primary: bool
    shared: bool = True

    def __post_init__(self) -> None:
        if len(self.box) != len(self.global_shape):
            raise ValueError(f"{self.name}: box {self.box} has not one entry per dimension of {self.global_shape}")
        for (offset, length), size in zip(self.box, self.global_shape, strict=True):
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(f"{self.name}: box {self.box} reaches outside of shape {self.global_shape}")
        start, stop = self.span
        if not 0 <= start <= stop <= self.box_numel:
            raise ValueError(f"{self.name}: span {self.span} reaches outside of a box of {self.box_numel} elements")
        if self.tensor.numel() != stop - start:
            raise ValueError(f"{self.name}: span {self.span} does not fit a tensor of {self.tensor.numel()} elements")

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, *, primary: bool, shared: bool = True) -> TensorSlice:
        """Returns the slice of a tensor that this rank holds whole."""
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
        )

    @property
    def box_numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(length for _, length in self.box)

    @property
    def is_whole(self) -> bool:
        """True where this rank holds every element of the logical tensor."""
        return self.span == (0, math.prod(self.global_shape))
