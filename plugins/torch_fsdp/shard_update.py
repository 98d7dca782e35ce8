"""Per-parameter updates: the shard that the optimizer updates, its gradient, and the write-back to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import LOW_PRECISION, all_reduce_sum, broadcast, collective_device, group_rank, group_size
from booster.core.shard_aware import update_master
from booster.interface import Shard

from .fsdp2_internals import ShardedParam
from .param_group import ParamGroup
from .param_redistribution import ParamRedistribution


@dataclass(slots=True, eq=False)
class ReplicatedParam:
    """A parameter that is replicated on every rank.

    Attributes:
        name: First name in the model.
        names: All names in the model.
        parameter: Parameter of the model.
        owner: Rank in the shard group that updates the parameter.
        is_used: Whether a backward of this accumulation produced a gradient.
        reduced_grad: Reduced gradient, on the owner only.
    """

    name: str
    names: tuple[str, ...]
    parameter: nn.Parameter
    owner: int
    is_used: bool = False
    reduced_grad: torch.Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.parameter.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires gradients."""
        return self.parameter.requires_grad

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the gradient reduction."""
        return self.parameter.dtype if self.parameter.dtype.itemsize >= 4 else torch.float32


class ReplicatedParams:
    """All replicated parameters of a model.

    Args:
        params: Parameters, equal on all ranks.
        shard_group: Group that the owners belong to.
    """

    def __init__(
        self,
        params: Sequence[ReplicatedParam],
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        self.params = tuple(params)
        self._shard_group = shard_group

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has any gradient, reduced or not."""
        return any(one.reduced_grad is not None or one.parameter.grad is not None for one in self.params)

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
            device = collective_device(None)
            contributions: list[torch.Tensor] = []
            for one in same_dtype:
                gradient = torch.zeros_like(one.parameter) if one.parameter.grad is None else one.parameter.grad
                part = gradient.detach().reshape(-1).to(dtype)
                contributions.append((part if one.reduced_grad is None else part + one.reduced_grad).to(device))
            flat = torch.cat(contributions)
            if group_size() > 1:
                flat = all_reduce_sum(flat, None)
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
        used = [one for one in self.params if one.is_used or (include_unused and one.requires_grad)]
        for owner in sorted({one.owner for one in used}):
            _broadcast_from(owner, [one.parameter.detach() for one in used if one.owner == owner], self._shard_group)


def _broadcast_from(owner: int, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    params = list(tensors)
    for dtype in dict.fromkeys(one.dtype for one in params):
        same_dtype = [one for one in params if one.dtype == dtype]
        joined = torch.cat([one.reshape(-1) for one in same_dtype]).to(collective_device(group))
        broadcast([joined], group, source=owner)
        for one, part in zip(same_dtype, joined.split([one.numel() for one in same_dtype]), strict=True):
            one.copy_(part.view(one.shape))


class ParamUpdate(ABC):
    """A trainable parameter on the optimizer's side.

    Args:
        param: The parameter.
        group_index: Index of its param group.

    Attributes:
        shard: Shard that this rank updates, or None.
    """

    shard: Shard | None = None

    def __init__(self, param: ShardedParam | ReplicatedParam, group_index: int) -> None:
        self.param = param
        self.group_index = group_index

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

    def set_gradient(self) -> None:
        """Set the shard's gradient to the reduced one; None if no rank used the parameter."""
        if self.shard is None:
            return
        parameter, gradient = self.shard.parameter, self.reduced_grad()
        if not self.param.is_used:
            parameter.grad = None
        elif gradient is None:  # zero_grad(set_to_none=False), and nothing since
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            parameter.grad = gradient.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype)

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
            update_master(self.shard.parameter.detach().view(-1), self.weights)

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


class _ShardedParamUpdate(ParamUpdate):
    """A sharded parameter, of whose weights and gradients every rank has its rows."""

    param: ShardedParam

    def __init__(self, group: ParamGroup, param: ShardedParam, group_index: int) -> None:
        super().__init__(param, group_index)
        self.group = group

    @property
    def weights(self) -> torch.Tensor:
        return self.param.shard

    def reduced_grad(self) -> torch.Tensor | None:
        return self.group.grad_shard_of(self.param)


class ShardUpdate(_ShardedParamUpdate):
    """A sharded parameter, whose shard is updated in place, in the memory that FSDP2 gathers from."""

    def __init__(self, group: ParamGroup, param: ShardedParam, group_index: int, *, is_primary: bool) -> None:
        super().__init__(group, param, group_index)
        if param.shard.numel() > 0:
            self.shard = shard_of(param, param.flat_range, param.shard, group_index, is_primary=is_primary)


class OwnedUpdate(_ShardedParamUpdate):
    """A sharded parameter, which is redistributed to its owner and updated there unsharded."""

    def __init__(
        self, group: ParamGroup, param: ShardedParam, group_index: int, owner: int, *, is_primary: bool
    ) -> None:
        super().__init__(group, param, group_index)
        self.owner = owner
        if param.rank == owner:
            memory = torch.empty(param.shape, dtype=param.shard.dtype, device=param.shard.device)
            self.shard = shard_of(param, (0, memory.numel()), memory, group_index, is_primary=is_primary)

    @property
    def memory(self) -> None:
        return None

    def set_gradient(self) -> None:
        """No-op, as `OwnedUpdates.gather_gradients` sets all gradients in one collective."""

    def write_weights(self) -> None:
        """No-op, as `OwnedUpdates.scatter_weights` writes all weights in one collective."""

    def refresh_master(self) -> None:
        """No-op, as the owners receive the current weights before every step."""


class ReplicatedUpdate(ParamUpdate):
    """A replicated parameter, which its owner updates."""

    param: ReplicatedParam

    def __init__(
        self,
        replicated: ReplicatedParams,
        param: ReplicatedParam,
        group_index: int,
        *,
        is_primary: bool,
        is_flat: bool,
    ) -> None:
        super().__init__(param, group_index)
        self._address = param.parameter.data_ptr()
        if replicated.owns(param) and param.parameter.numel() > 0:
            weights = param.parameter.detach()
            memory = weights.view(-1) if is_flat else weights
            self.shard = shard_of(param, (0, weights.numel()), memory, group_index, is_primary=is_primary)

    @property
    def weights(self) -> torch.Tensor:
        return self.param.parameter.detach().view(-1)

    def reduced_grad(self) -> torch.Tensor | None:
        return self.param.reduced_grad

    @property
    def has_moved(self) -> bool:
        """Whether the weights were reallocated, so that updates would not reach them; equal on all ranks."""
        return self._address != self.param.parameter.data_ptr()


class OwnedUpdates:
    """All sharded parameters of a model that their owners update unsharded.

    Args:
        updates: Updates of the parameters, equal on all ranks.
        redistribution: Redistribution over the shard group; its indices are those of `updates`.
    """

    def __init__(self, updates: Sequence[OwnedUpdate], redistribution: ParamRedistribution) -> None:
        self.updates = tuple(updates)
        self._redistribution = redistribution

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Set the reduced gradients of the owners' parameters. Collective."""
        for one in self.updates:
            if one.shard is not None:
                one.shard.parameter.grad = None
        used = {index: one for index, one in enumerate(self.updates) if one.param.is_used}
        for dtype in dict.fromkeys(one.group.grad_dtype for one in used.values()):
            chosen = {index: one for index, one in used.items() if one.group.grad_dtype == dtype}
            reduced_grads: dict[int, torch.Tensor] = {}
            for index, one in chosen.items():
                gradient = one.reduced_grad()
                reduced_grads[index] = torch.zeros_like(one.weights, dtype=dtype) if gradient is None else gradient
            for index, full_grad in self._redistribution.to_owners(reduced_grads, indices=chosen, dtype=dtype).items():
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
                update_master(shard.parameter.detach(), full_param)
            else:
                shard.parameter.copy_(full_param)

    @torch.no_grad()
    def scatter_weights(self, *, include_unused: bool = False) -> None:
        """Write the owners' updated parameters back to all ranks' shards. Collective.

        Args:
            include_unused: If True, unused parameters are written as well.
        """
        chosen = {index: one for index, one in enumerate(self.updates) if include_unused or one.param.is_used}
        full_params = {
            index: one.shard.parameter.detach().to(one.weights.dtype)
            for index, one in chosen.items()
            if one.shard is not None
        }
        shards = {index: one.weights for index, one in chosen.items()}
        self._redistribution.from_owners(full_params, shards, indices=chosen)


def shard_of(
    param: ShardedParam | ReplicatedParam,
    span: tuple[int, int],
    memory: torch.Tensor,
    group_index: int,
    *,
    is_primary: bool,
) -> Shard:
    """Return a shard of a parameter in given memory.

    Args:
        param: Parameter.
        span: Flat range of the shard.
        memory: Memory of the shard, flat or in the shape of the parameter.
        group_index: Index of the parameter's param group.
        is_primary: If True, this rank writes the shard; False on the other replicas.
    """
    return Shard(
        name=param.name,
        global_shape=param.shape,
        span=span,
        parameter=nn.Parameter(memory.detach()),
        model_param=param.parameter,
        group_index=group_index,
        has_master=False,
        is_primary=is_primary,
    )


def new_master(shard: Shard, unrounded: torch.Tensor | None) -> Shard:
    """Return the shard with an fp32 master copy of its weights.

    Args:
        shard: Shard with rounded weights.
        unrounded: Unsharded parameter before rounding; optional, defaults to the rounded values. Elements that do not
            round to the current weights, as after a broadcast from another rank, start at the rounded values.
    """
    rounded = shard.parameter.detach()
    values = rounded.float()
    if unrounded is not None and not unrounded.is_meta:
        values = unrounded.detach().reshape(-1)[slice(*shard.span)].to(rounded.device, torch.float32, copy=True)
        values = values.view(rounded.shape)
        update_master(values, rounded)
    return replace(shard, parameter=nn.Parameter(values), has_master=True)
