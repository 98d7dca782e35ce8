"""Replicated parameters, which FSDP2 can't shard; one owner in the shard group updates each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum, broadcast, collective_device, group_rank, group_size

__all__ = ["ReplicatedParam", "ReplicatedParams"]


@dataclass(slots=True, eq=False)
class ReplicatedParam:
    """A parameter that is replicated on every rank.

    Attributes:
        name: First name in the model.
        names: All names in the model.
        parameter: Parameter of the model.
        owner: Rank in the shard group that updates the parameter.
        is_used: Whether a backward of this accumulation produced a gradient.
        sums: Reduced gradient, on the owner only.
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
        members: Parameters, equal on all ranks.
        data_parallel_group: Group over which gradients are summed; None for the world group.
        shard_group: Group that the owners belong to.
    """

    def __init__(
        self,
        members: Sequence[ReplicatedParam],
        data_parallel_group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        self.params = tuple(members)
        self._data_parallel_group = data_parallel_group
        self._shard_group = shard_group

    @property
    def trainable_params(self) -> tuple[ReplicatedParam, ...]:
        """Trainable parameters."""
        return tuple(one for one in self.params if one.requires_grad)

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has any gradient, reduced or not."""
        return any(one.reduced_grad is not None or one.parameter.grad is not None for one in self.params)

    def owns(self, member: ReplicatedParam) -> bool:
        """Return whether this rank updates the parameter."""
        return group_rank(self._shard_group) == member.owner

    def mark_used(self) -> None:
        """Mark parameters that have a gradient on this rank as used."""
        for one in self.params:
            one.is_used = one.is_used or one.parameter.grad is not None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of used parameters; only the owners keep the result. Collective.

        `is_used` must be equal on all ranks. Gradients that are reduced over the shard group already are summed over
        its replicas.
        """
        used = [one for one in self.trainable_params if one.is_used]
        for dtype in dict.fromkeys(one.grad_dtype for one in used):
            members = [one for one in used if one.grad_dtype == dtype]
            device = collective_device(self._data_parallel_group)
            flat = torch.cat([self._contribution_of(one).to(device, dtype) for one in members])
            if group_size(self._data_parallel_group) > 1:
                flat = all_reduce_sum(flat, self._data_parallel_group)
            for one, part in zip(members, flat.split([one.parameter.numel() for one in members]), strict=True):
                one.parameter.grad = None
                one.reduced_grad = part.to(one.parameter.device) if self.owns(one) else None

    def _contribution_of(self, member: ReplicatedParam) -> torch.Tensor:
        gradient = member.parameter.grad
        contribution = torch.zeros_like(member.parameter) if gradient is None else gradient
        contribution = contribution.detach().reshape(-1).to(member.grad_dtype)
        return contribution if member.reduced_grad is None else contribution + member.reduced_grad

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
        used = [one for one in self.trainable_params if one.is_used or include_unused]
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
