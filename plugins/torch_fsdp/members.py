"""A parameter that FSDP2 has sharded on dim 0."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["ShardedParam", "hide_post_accumulate_hooks"]


# One parameter has several tensors: the user's from before boost(), the sharded one that the model shows between
# forwards, and the gathered one that forwards use and that autograd accumulates the unreduced gradient into. The user
# sees one parameter. So all of them share one dictionary of attributes and of hooks, and the last assignment to
# requires_grad of any of them holds for all.
def _share_attributes(original: torch.Tensor, other: torch.Tensor) -> None:
    if other.__dict__ is original.__dict__:
        return
    original.__dict__.update(other.__dict__)
    other.__dict__ = original.__dict__
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(original, name) is None:
                setattr(original, name, OrderedDict())
            setattr(other, name, getattr(original, name))
    if type(other) is nn.Parameter:
        other.__class__ = type(original)  # type: ignore[assignment]


@contextmanager
def hide_post_accumulate_hooks(members: Iterable[ShardedParam]) -> Iterator[None]:
    """Hide the hooks of sharded parameters from FSDP2.

    FSDP2 would call them with the reduced gradient, which is still in flight here.
    """
    kept = [(one.parameter, hooks) for one in members if (hooks := one.parameter._post_accumulate_grad_hooks)]
    for parameter, _ in kept:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, hooks in kept:
            parameter._post_accumulate_grad_hooks = hooks


@dataclass(slots=True, eq=False)
class ShardedParam:
    """A sharded parameter of a parameter group.

    Attributes:
        name: First name in the model.
        names: All names in the model.
        original: The user's tensor from before boost(), emptied.
        parameter: DTensor that the model shows between forwards.
        state: FSDP2's `FSDPParam`.
        rank: This rank's index in the group that the parameter is sharded over.
        is_used: Whether a backward of this accumulation produced a gradient.
        address: Data pointer of this rank's shard when the model was boosted.
    """

    name: str
    names: tuple[str, ...]
    original: nn.Parameter = field(repr=False)
    parameter: nn.Parameter
    state: FSDPParam = field(repr=False)
    rank: int
    is_used: bool = False
    data_ptr: int = field(init=False, repr=False)
    _requires_grad: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.data_ptr = self.state._sharded_param_data.data_ptr()
        self._requires_grad = self.parameter.requires_grad
        _share_attributes(self.original, self.parameter)
        self.state._setattr_on_modules = self._set_on_modules  # type: ignore[assignment, method-assign]

    def _set_on_modules(self, parameter: nn.Parameter) -> None:
        """Replacement of `FSDPParam._setattr_on_modules`."""
        _share_attributes(self.original, parameter)
        parameter.requires_grad_(self.requires_grad)
        FSDPParam._setattr_on_modules(self.state, parameter)

    @property
    def has_moved(self) -> bool:
        """Whether this rank's shard was reallocated."""
        return self.state._sharded_param_data.data_ptr() != self.data_ptr

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unsharded parameter."""
        return tuple(self.parameter.shape)

    @property
    def padded_numel(self) -> int:
        """Elements of every rank's shard, with padding."""
        return self.state.padded_sharded_param_size.numel()

    @property
    def flat_range(self) -> tuple[int, int]:
        """This rank's flat range of the row-major parameter."""
        numel = math.prod(self.shape)
        start = min(numel, self.rank * self.padded_numel)
        return start, min(numel, start + self.padded_numel)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard without padding, flat, in the memory that FSDP2 gathers from."""
        start, stop = self.flat_range
        return self.state._sharded_param_data[: stop - start]

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of this rank's shard, per dimension."""
        rest = math.prod(self.shape[1:])
        start, stop = (bound // rest for bound in self.flat_range) if rest else (0, 0)
        return ((start, stop - start), *((0, size) for size in self.shape[1:]))

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires gradients."""
        return self.sync_requires_grad()

    def sync_requires_grad(self) -> bool:
        """Apply the last change of requires_grad on any of the tensors to all of them, and return it."""
        info = self.state._module_info
        tensors = [self.original, self.parameter, getattr(info.module, info.param_name)]
        if any(one.requires_grad != self._requires_grad for one in tensors):
            self._requires_grad = not self._requires_grad
            for one in tensors:
                one.requires_grad_(self._requires_grad)
        return self._requires_grad

    @property
    def was_gathered(self) -> bool:
        """Whether FSDP2 has gathered the parameter before; until then it cannot hold gradients."""
        return hasattr(self.state, "_unsharded_param")

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has an unreduced gradient."""
        full_param = getattr(self.state, "_unsharded_param", None)
        return self.state.unsharded_accumulated_grad is not None or (
            full_param is not None and full_param.grad is not None
        )

    def unreduced_grad(self) -> torch.Tensor | None:
        """Return this rank's unreduced, unsharded gradient, still scaled."""
        accumulated = self.state.unsharded_accumulated_grad
        full_param = getattr(self.state, "_unsharded_param", None)
        fresh: torch.Tensor | None = None if full_param is None else full_param.grad
        if accumulated is None or fresh is None:
            return fresh if accumulated is None else accumulated
        return accumulated + fresh

    def clear_unreduced_grad(self) -> None:
        """Drop the unreduced gradient."""
        self.state.unsharded_accumulated_grad = None
        full_param = getattr(self.state, "_unsharded_param", None)
        if full_param is not None:
            full_param.grad = None
