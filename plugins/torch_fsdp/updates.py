"""Per-parameter updates: the shard that the optimizer updates, its gradient, and the write-back to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from booster.interface import Shard
from booster.mixed_precision.master_weights import LOW_PRECISION
from booster.plugins.sharding.masters import take_over
from booster.plugins.torch_fsdp.members import ShardedParam
from booster.plugins.torch_fsdp.piece_exchange import ParamRedistribution
from booster.plugins.torch_fsdp.units import ParamGroup
from booster.plugins.torch_fsdp.whole_parameters import ReplicatedParam, ReplicatedParams

__all__ = ["OwnedUpdate", "OwnedUpdates", "ParamUpdate", "ReplicatedUpdate", "ShardUpdate", "new_master"]


class ParamUpdate(ABC):
    """A trainable parameter on the optimizer's side.

    Args:
        group_index: Index of its param group.

    Attributes:
        shard: Shard that this rank updates, or None.
    """

    shard: Shard | None = None

    def __init__(self, group_index: int) -> None:
        self.group_index = group_index

    @property
    @abstractmethod
    def param(self) -> ShardedParam | ReplicatedParam:
        """The parameter."""

    @property
    @abstractmethod
    def weights(self) -> torch.Tensor:
        """This rank's shard of the model's weights, flat."""

    @property
    def memory(self) -> torch.Tensor | None:
        """Memory that the shard must be a view of, or None if it has separate memory."""
        return None if self.shard is None or self.shard.has_master else self.weights

    @abstractmethod
    def reduced_grad(self) -> torch.Tensor | None:
        """Return this rank's shard of the reduced gradient, flat, or None."""

    @abstractmethod
    def set_gradient(self) -> None:
        """Set the shard's gradient to the reduced one; None if no rank used the parameter."""

    def has_moved(self) -> bool:
        """Return whether the weights were reallocated, so that updates would not reach them."""
        return False

    @property
    def rounds_in_place(self) -> bool:
        """Whether the shard is a master copy of weights on the same device."""
        return self.shard is not None and self.shard.has_master

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the updated master weights into the model's weights."""
        if self.shard is not None and self.shard.has_master:
            self.weights.copy_(self.shard.parameter.detach().reshape(-1))

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Update the master weights from model weights that were changed outside of the optimizer."""
        if self.shard is not None and self.shard.has_master:
            take_over(self.shard.parameter.detach().view(-1), self.weights)

    def create_master(self, originals: Mapping[int, torch.Tensor], original_id: int) -> nn.Parameter | None:
        """Replace the shard by an fp32 master copy; return the parameter that was replaced, or None.

        Args:
            originals: Unrounded, unsharded weights by the `id` of the user's parameter.
            original_id: `id` of this parameter.
        """
        shard = self.shard
        if shard is None or shard.has_master or shard.parameter.dtype not in LOW_PRECISION:
            return None
        unrounded = originals.get(original_id)
        self.shard = new_master(shard, unrounded)
        return shard.parameter


class ShardUpdate(ParamUpdate):
    """A sharded parameter, whose shard is updated in place, in the memory that FSDP2 gathers from."""

    def __init__(self, unit: ParamGroup, member: ShardedParam, group_index: int, *, is_primary: bool) -> None:
        super().__init__(group_index)
        self.group = unit
        self._param = member
        start, stop = member.flat_range
        if stop > start:
            self.shard = _shard_of(member, (start, stop), member.shard, group_index, is_primary=is_primary)

    @property
    def param(self) -> ShardedParam:
        return self._param

    @property
    def weights(self) -> torch.Tensor:
        return self._param.shard

    def reduced_grad(self) -> torch.Tensor | None:
        return self.group.grad_shard_of(self._param)

    def set_gradient(self) -> None:
        if self.shard is not None:
            self.shard.parameter.grad = _gradient_for(self.shard, self._param.is_used, self.reduced_grad())


class ReplicatedUpdate(ParamUpdate):
    """A replicated parameter, which its owner updates."""

    def __init__(
        self,
        replicated: ReplicatedParams,
        member: ReplicatedParam,
        group_index: int,
        *,
        is_primary: bool,
        is_flat: bool,
    ) -> None:
        super().__init__(group_index)
        self._param = member
        if replicated.owns(member) and member.parameter.numel() > 0:
            memory = member.parameter.detach()
            self.shard = _shard_of(
                member,
                (0, memory.numel()),
                memory.view(-1) if is_flat else memory,
                group_index,
                is_primary=is_primary,
            )

    @property
    def param(self) -> ReplicatedParam:
        return self._param

    @property
    def weights(self) -> torch.Tensor:
        return self._param.parameter.detach().view(-1)

    def reduced_grad(self) -> torch.Tensor | None:
        return self._param.reduced_grad

    def set_gradient(self) -> None:
        if self.shard is not None:
            self.shard.parameter.grad = _gradient_for(self.shard, self._param.is_used, self.reduced_grad())

    def has_moved(self) -> bool:
        shard = self.shard
        if shard is None or shard.has_master:
            return False
        return shard.parameter.data_ptr() != self._param.parameter.data_ptr()


class OwnedUpdate(ParamUpdate):
    """A sharded parameter, which is redistributed to its owner and updated there unsharded."""

    def __init__(
        self, unit: ParamGroup, member: ShardedParam, group_index: int, owner: int, *, is_primary: bool
    ) -> None:
        super().__init__(group_index)
        self.group = unit
        self.owner = owner
        self._param = member
        if member.rank == owner:
            memory = torch.empty(member.shape, dtype=member.shard.dtype, device=member.shard.device)
            self.shard = _shard_of(member, (0, memory.numel()), memory, group_index, is_primary=is_primary)

    @property
    def param(self) -> ShardedParam:
        return self._param

    @property
    def weights(self) -> torch.Tensor:
        return self._param.shard

    def reduced_grad(self) -> torch.Tensor | None:
        return self.group.grad_shard_of(self._param)

    @property
    def memory(self) -> None:
        return None

    def gradient_or_zeros(self) -> torch.Tensor:
        """Return this rank's shard of the reduced gradient, flat; zeros if there is none."""
        sums = self.reduced_grad()
        return torch.zeros_like(self.weights, dtype=self.group.grad_dtype) if sums is None else sums

    def set_gradient(self) -> None:
        """No-op, as `OwnedUpdates.gather_gradients` sets all gradients in one collective."""

    def write_weights(self) -> None:
        """No-op, as `OwnedUpdates.scatter_weights` writes all weights in one collective."""

    def refresh_master(self) -> None:
        """No-op, as the owners receive the current weights before every step."""


class OwnedUpdates:
    """All sharded parameters of a model that their owners update unsharded.

    Args:
        updates: Updates of the parameters, equal on all ranks.
        exchange: Redistribution over the shard group; its indices are those of `updates`.
    """

    def __init__(self, updates: Sequence[OwnedUpdate], redistribution: ParamRedistribution) -> None:
        self.updates = tuple(updates)
        self._redistribution = redistribution

    def _used(self) -> dict[int, OwnedUpdate]:
        return {index: one for index, one in enumerate(self.updates) if one.param.is_used}

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Set the reduced gradients of the owners' parameters. Collective."""
        for one in self.updates:
            if one.shard is not None:
                one.shard.parameter.grad = None
        used = self._used()
        for dtype in dict.fromkeys(one.group.grad_dtype for one in used.values()):
            chosen = {index: one for index, one in used.items() if one.group.grad_dtype == dtype}
            sums = {index: one.gradient_or_zeros() for index, one in chosen.items()}
            for index, full_grad in self._redistribution.to_owners(sums, indices=chosen, dtype=dtype).items():
                shard = chosen[index].shard
                assert shard is not None
                shard.parameter.grad = full_grad.to(device=shard.parameter.device, dtype=shard.parameter.dtype)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Set the owners' parameters to the current weights; equal master weights keep their precision. Collective."""
        shards = {index: one.weights for index, one in enumerate(self.updates)}
        for index, full_param in self._redistribution.to_owners(shards).items():
            shard = self.updates[index].shard
            assert shard is not None
            if shard.has_master:
                take_over(shard.parameter.detach(), full_param)
            else:
                shard.parameter.copy_(full_param)

    @torch.no_grad()
    def scatter_weights(self, *, include_unused: bool = False) -> None:
        """Write the owners' updated parameters back to all ranks' shards. Collective.

        Args:
            everything: If True, unused parameters are written as well.
        """
        chosen = dict(enumerate(self.updates)) if include_unused else self._used()
        full_params = {
            index: one.shard.parameter.detach().to(one.weights.dtype)
            for index, one in chosen.items()
            if one.shard is not None
        }
        shards = {index: one.weights for index, one in chosen.items()}
        self._redistribution.from_owners(full_params, shards, indices=chosen)


def _shard_of(
    member: ShardedParam | ReplicatedParam,
    span: tuple[int, int],
    memory: torch.Tensor,
    group_index: int,
    *,
    is_primary: bool,
) -> Shard:
    return Shard(
        name=member.name,
        global_shape=member.shape,
        span=span,
        parameter=nn.Parameter(memory.detach()),
        model_param=member.parameter,
        group_index=group_index,
        has_master=False,
        is_primary=is_primary,
    )


def new_master(shard: Shard, unrounded: torch.Tensor | None) -> Shard:
    """Return the shard with an fp32 master copy of its weights.

    Args:
        shard: Shard with rounded weights.
        unrounded: Unsharded parameter before rounding; optional, defaults to the rounded values. Elements that do not round
            to the current weights, as after a broadcast from another rank, start at the rounded values.
    """
    rounded = shard.parameter.detach()
    values = rounded.float()
    if unrounded is not None and not unrounded.is_meta:
        values = unrounded.detach().reshape(-1)[slice(*shard.span)].to(rounded.device, torch.float32, copy=True)
        values = values.view(rounded.shape)
        take_over(values, rounded)
    return Shard(
        name=shard.name,
        global_shape=shard.global_shape,
        span=shard.span,
        parameter=nn.Parameter(values),
        model_param=shard.model_param,
        group_index=shard.group_index,
        has_master=True,
        is_primary=shard.is_primary,
    )


def _gradient_for(shard: Shard, is_used: bool, sums: torch.Tensor | None) -> torch.Tensor | None:
    parameter = shard.parameter
    if not is_used:
        return None
    if sums is None:  # zero_grad(set_to_none=False), and nothing since
        return torch.zeros_like(parameter, requires_grad=False)
    return sums.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype)
