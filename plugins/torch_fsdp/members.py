"""A parameter that FSDP2 has cut into rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["Member"]


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit.

    Attributes:
        name: Its first name in the model.
        names: All of them.
        parameter: What the model shows of it between forwards, a DTensor.
        state: FSDP2's.
        rank: This rank's place among those that share it.
        is_used: A backward of this window gave it a gradient.
        address: Where this rank's rows were when the model was boosted.
    """

    name: str
    names: tuple[str, ...]
    parameter: nn.Parameter
    state: FSDPParam = field(repr=False)
    rank: int
    is_used: bool = False
    address: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.address = self.state._sharded_param_data.data_ptr()

    @property
    def has_moved(self) -> bool:
        """Whether this rank's rows were replaced."""
        return self.state._sharded_param_data.data_ptr() != self.address

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.parameter.shape)

    @property
    def piece_numel(self) -> int:
        """Elements that every rank has, with padding."""
        return self.state.padded_sharded_param_size.numel()

    @property
    def span(self) -> tuple[int, int]:
        """This rank's elements of the row-major parameter."""
        numel = math.prod(self.shape)
        start = min(numel, self.rank * self.piece_numel)
        return start, min(numel, start + self.piece_numel)

    @property
    def piece(self) -> torch.Tensor:
        """This rank's elements, flat, in the memory that FSDP2 gathers from."""
        start, stop = self.span
        return self.state._sharded_param_data[: stop - start]

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """This rank's rows as offset and length per dimension."""
        rest = math.prod(self.shape[1:])
        start, stop = (bound // rest for bound in self.span) if rest else (0, 0)
        return ((start, stop - start), *((0, size) for size in self.shape[1:]))

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return self.parameter.requires_grad

    @property
    def was_gathered(self) -> bool:
        """Whether FSDP2 has gathered it once, before which it has no place for gradients."""
        return hasattr(self.state, "_unsharded_param")

    @property
    def has_local_gradient(self) -> bool:
        """Whether this rank has a gradient that was not reduced yet."""
        whole = getattr(self.state, "_unsharded_param", None)
        return self.state.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    def local_gradient(self) -> torch.Tensor | None:
        """Returns this rank's own raw gradient that was not reduced yet, whole."""
        kept = self.state.unsharded_accumulated_grad
        whole = getattr(self.state, "_unsharded_param", None)
        fresh: torch.Tensor | None = None if whole is None else whole.grad
        if kept is None or fresh is None:
            return fresh if kept is None else kept
        return kept + fresh

    def forget_local_gradient(self) -> None:
        """Drops it."""
        self.state.unsharded_accumulated_grad = None
        whole = getattr(self.state, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None
