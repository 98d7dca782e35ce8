"""Description of the elements of a logical tensor that a rank holds, shared by all layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from booster.deprecation import DeprecatedAlias


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
    def full(cls, name: str, tensor: torch.Tensor, *, primary: bool, shared: bool = True) -> TensorSlice:
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
