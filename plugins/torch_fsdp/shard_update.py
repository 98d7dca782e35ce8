"""Per-parameter updates: the shard that the optimizer updates, its gradient, and the write-back to the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import LOW_PRECISION, all_reduce_sum, broadcast, collective_device, group_rank, group_size
from booster.core.param_redistribution import ParamRedistribution
from booster.core.shard_aware import update_master
from booster.core.shard_spec import Box
from booster.interface import Shard

from .fsdp2_internals import ShardedParam


@dataclass(slots=True, eq=False)
class ReplicatedParam:
    """A parameter that is replicated on every rank; it has the attributes of a `ShardedParam`.

    Attributes:
        name: First name in the model.
        parameter: Parameter of the model.
        owner: Rank in the shard group that updates the parameter.
        is_used: Whether a backward of this accumulation produced a gradient.
        reduced_grad: Reduced gradient, flat, on the owner only.
    """

    name: str
    parameter: nn.Parameter
    owner: int
    is_used: bool = False
    reduced_grad: torch.Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.parameter.shape)

    @property
    def shard(self) -> torch.Tensor:
        """The weights, flat."""
        return self.parameter.detach().view(-1)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the gradient reduction."""
        return self.parameter.dtype if self.parameter.dtype.itemsize >= 4 else torch.float32

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has an unreduced gradient."""
        return self.parameter.grad is not None

    def unreduced_grad(self) -> torch.Tensor | None:
        """Return this rank's unreduced gradient, still scaled."""
        return self.parameter.grad


Param: TypeAlias = ShardedParam | ReplicatedParam


class ReplicatedParams:
    """All replicated parameters of a model.

    Args:
        params: Parameters, equal on all ranks.
        shard_group: Group that the owners belong to.
    """

    def __init__(self, params: Sequence[ReplicatedParam], shard_group: dist.ProcessGroup | None) -> None:
        self.params = tuple(params)
        self._shard_group = shard_group

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has any gradient, reduced or not."""
        return any(one.reduced_grad is not None or one.has_unreduced_grad for one in self.params)

    def owns(self, param: ReplicatedParam) -> bool:
        """Return whether this rank updates the parameter."""
        return group_rank(self._shard_group) == param.owner

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of used parameters; only the owners keep the result. Collective.

        `is_used` must be equal on all ranks. Gradients that are reduced over the shard group already are summed over
        its replicas.
        """
        used = [one for one in self.params if one.is_used]
        for dtype in dict.fromkeys(one.grad_dtype for one in used):
            same_dtype = [one for one in used if one.grad_dtype == dtype]
            device = collective_device()
            contributions: list[torch.Tensor] = []
            for one in same_dtype:
                gradient = torch.zeros_like(one.parameter) if one.parameter.grad is None else one.parameter.grad
                part = gradient.detach().reshape(-1).to(dtype)
                contributions.append((part if one.reduced_grad is None else part + one.reduced_grad).to(device))
            flat = all_reduce_sum(torch.cat(contributions))
            for one, part in zip(same_dtype, flat.split([one.parameter.numel() for one in same_dtype]), strict=True):
                one.parameter.grad = None
                one.reduced_grad = part.to(one.parameter.device) if self.owns(one) else None

    def clear_grads(self, *, keep_used: bool = False) -> None:
        """Drop all gradients."""
        for one in self.params:
            one.parameter.grad = one.reduced_grad = None
            one.is_used = one.is_used and keep_used

    @torch.no_grad()
    def broadcast_weights(self, *, include_unused: bool = False) -> None:
        """Broadcast updated parameters from their owners over the shard group. Collective.

        Args:
            include_unused: If True, unused parameters are broadcast as well.
        """
        if group_size(self._shard_group) == 1:
            return
        used = [one for one in self.params if one.is_used or (include_unused and one.parameter.requires_grad)]
        for owner in sorted({one.owner for one in used}):
            parts = [one.shard.view(torch.uint8) for one in used if one.owner == owner]
            joined = torch.cat(parts)
            broadcast([joined], self._shard_group, source=owner)
            torch._foreach_copy_(parts, joined.split([part.numel() for part in parts]))


@dataclass(slots=True, eq=False)
class ParamUpdate:
    """A trainable parameter on the optimizer's side.

    Attributes:
        param: The parameter.
        group_index: Index of its param group.
        shard: Shard that this rank updates, or None.
        owner: Rank that a sharded parameter is redistributed to, and that updates it unsharded; None if each rank
            updates its shard in place, or if the parameter is replicated.
    """

    param: Param
    group_index: int
    shard: Shard | None
    owner: int | None = None
    _address: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._address = self.param.parameter.data_ptr()

    @property
    def has_moved(self) -> bool:
        """Whether replicated weights were reallocated, so that updates would not reach them; equal on all ranks.

        Memory of sharded ones is `FSDPModel.check_not_moved`'s.
        """
        return isinstance(self.param, ReplicatedParam) and self._address != self.param.parameter.data_ptr()

    @property
    def master(self) -> torch.Tensor | None:
        """Master weights of `param.shard`, flat, or None; see `RedistributedParams` for those of full parameters."""
        if self.shard is None or not self.shard.has_master or self.owner is not None:
            return None
        return self.shard.parameter.detach().view(-1)

    @torch.no_grad()
    def add_master(self, unrounded: torch.Tensor | None) -> nn.Parameter | None:
        """Replace a low-precision shard by an fp32 master copy; return the parameter that was replaced, or None.

        Args:
            unrounded: Unsharded parameter before rounding; optional, defaults to the rounded values. Elements that do
                not round to the current weights, as after a broadcast from another rank, start at the rounded values.
        """
        shard = self.shard
        if shard is None or shard.has_master or shard.parameter.dtype not in LOW_PRECISION:
            return None
        rounded = shard.parameter.detach()
        values = rounded.float()
        if unrounded is not None and not unrounded.is_meta:
            values = unrounded.detach().reshape(-1)[slice(*shard.span)].to(rounded.device, torch.float32, copy=True)
            values = values.view(rounded.shape)
            update_master(values, rounded)
        self.shard = replace(shard, parameter=nn.Parameter(values), has_master=True)
        return shard.parameter

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set the shard's gradient to the reduced one; to None if no rank used the parameter."""
        if self.shard is None:
            return
        parameter = self.shard.parameter
        if not self.param.is_used:
            parameter.grad = None
        elif gradient is None:  # zero_grad(set_to_none=False), and nothing since
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            parameter.grad = gradient.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype)

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the updated master weights into the model's weights."""
        master = self.master
        if master is not None:
            self.param.shard.copy_(master)

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Update the master weights from model weights that were changed outside of the optimizer."""
        master = self.master
        if master is not None:
            update_master(master, self.param.shard)


def row_range(shape: Sequence[int], rank: int, num_ranks: int) -> tuple[int, int]:
    """Return start and stop of a rank's flat range of a row-major parameter.

    Shards have equally many full rows, except that the last ranks may have fewer or none. A scalar counts as one row.

    Args:
        shape: Unsharded shape.
        rank: Rank in the group that the rows are sharded over.
        num_ranks: Size of that group.
    """
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    rows_each = -(-rows // num_ranks)
    return min(rank * rows_each, rows) * rest, min((rank + 1) * rows_each, rows) * rest


class RowRedistribution(ParamRedistribution):
    """Redistributes row-sharded parameters to their owners, and back; see `ParamRedistribution`."""

    def blocks_of(self, rank: int, index: int, *, to_owner: bool) -> Sequence[Box]:
        shape = self._shapes[index]
        start, stop = row_range(shape, rank, self._num_ranks)
        if start == stop:
            return ()
        row = math.prod(shape[1:])
        return (((start // row, (stop - start) // row), *((0, size) for size in shape[1:])),) if shape else ((),)

    def to_owners(self, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the unsharded tensors of the parameters that this rank owns, in newly allocated memory.

        Args:
            shards: This rank's contiguous shards, possibly empty, of any of the parameters; which ones, and their
                dtypes, are equal on all ranks.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        device = next((one.device for one in shards.values()), torch.device("cpu"))
        return self.gather(self._blocks(shards), {index: one.dtype for index, one in shards.items()}, device)

    def from_owners(self, full_tensors: Mapping[int, torch.Tensor], shards: Mapping[int, torch.Tensor]) -> None:
        """Fill this rank's shards in place from the owners' unsharded tensors; the inverse of `to_owners`.

        Args:
            full_tensors: Unsharded tensors of those of the parameters that this rank owns, in the shards' dtypes.
            shards: As in `to_owners`.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        self.scatter(full_tensors, self._blocks(shards), {index: one.dtype for index, one in shards.items()})

    def _blocks(self, shards: Mapping[int, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        return {index: [one] * len(self.blocks_of(self._rank, index, to_owner=True)) for index, one in shards.items()}

    def _largest(self, sizes: object, dtypes: Mapping[int, torch.dtype]) -> int:
        largest = [0] * self._num_ranks  # by owner, what it receives of the first other rank, which has the most rows
        for index, dtype in dtypes.items():
            owner = self._owners[index]
            start, stop = row_range(self._shapes[index], int(owner == 0), self._num_ranks)
            largest[owner] += (stop - start) * dtype.itemsize
        return max(largest, default=0)


class RedistributedParams:
    """The sharded parameters of a model that their owners update unsharded.

    Args:
        updates: Updates of parameters, equal on all ranks; those without an owner are left out.
        shard_group: Group that the rows are sharded over.
    """

    def __init__(self, updates: Sequence[ParamUpdate], shard_group: dist.ProcessGroup | None) -> None:
        owners = {one: one.owner for one in updates if one.owner is not None}
        self._updates = tuple(owners)
        shapes = [one.param.shape for one in owners]
        self._redistribution = RowRedistribution(shapes, list(owners.values()), shard_group)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Set the reduced gradients of the owners' parameters. Collective."""
        used = {index: one.param for index, one in enumerate(self._updates) if one.param.is_used}
        full_grads = self._redistribution.to_owners(
            {
                index: torch.zeros_like(param.shard) if param.reduced_grad is None else param.reduced_grad
                for index, param in used.items()
            }
        )
        for index, one in enumerate(self._updates):
            one.set_gradient(full_grads.get(index))

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Set the owners' parameters to the current weights; equal master weights keep their precision. Collective."""
        shards = {index: one.param.shard for index, one in enumerate(self._updates)}
        for index, full_param in self._redistribution.to_owners(shards).items():
            shard = self._updates[index].shard
            assert shard is not None
            if shard.has_master:
                update_master(shard.parameter.detach(), full_param)
            else:
                shard.parameter.copy_(full_param)

    @torch.no_grad()
    def scatter_weights(self, *, include_unused: bool = False) -> None:
        """Write the owners' updated parameters back to all ranks' shards. Collective.

        Args:
            include_unused: If True, unused parameters are written as well.
        """
        chosen = {index: one for index, one in enumerate(self._updates) if include_unused or one.param.is_used}
        shards = {index: one.param.shard for index, one in chosen.items()}
        full_params = {
            index: one.shard.parameter.to(shards[index].dtype) for index, one in chosen.items() if one.shard is not None
        }
        self._redistribution.from_owners(full_params, shards)
