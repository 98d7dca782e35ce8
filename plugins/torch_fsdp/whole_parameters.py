"""Parameters that FSDP2 can't hold: every rank has them whole, one of those that share shards updates them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum, broadcast, collective_device, group_rank, group_size

__all__ = ["WholeMember", "WholeParameters"]


@dataclass(slots=True, eq=False)
class WholeMember:
    """A parameter that is whole on every rank.

    Attributes:
        name: Its first name in the model.
        names: All of them.
        parameter: The model's.
        owner: Which of the ranks that share shards updates it.
        is_used: A backward of this window gave it a gradient.
        sums: What was summed over the ranks already, on the owner.
    """

    name: str
    names: tuple[str, ...]
    parameter: nn.Parameter
    owner: int
    is_used: bool = False
    sums: torch.Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return tuple(self.parameter.shape)

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return self.parameter.requires_grad

    @property
    def sum_dtype(self) -> torch.dtype:
        """The format in which its gradients are summed."""
        return self.parameter.dtype if self.parameter.dtype.itemsize >= 4 else torch.float32


class WholeParameters:
    """All such parameters of a model.

    Args:
        members: The parameters, the same on all ranks.
        data_parallel_group: The ranks whose gradients are summed; None: the world.
        shard_group: The ranks among which owners were chosen.
    """

    def __init__(
        self,
        members: Sequence[WholeMember],
        data_parallel_group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        self.members = tuple(members)
        self._data_parallel_group = data_parallel_group
        self._shard_group = shard_group

    @property
    def trained(self) -> tuple[WholeMember, ...]:
        """Those that gradients are wanted for."""
        return tuple(one for one in self.members if one.trains)

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has any, its own or sums."""
        return any(one.sums is not None or one.parameter.grad is not None for one in self.members)

    def is_own(self, member: WholeMember) -> bool:
        """Returns whether this rank updates it."""
        return group_rank(self._shard_group) == member.owner

    def note_use(self) -> None:
        """Marks what has a gradient on this rank."""
        for one in self.members:
            one.is_used = one.is_used or one.parameter.grad is not None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums gradients of what is used on any rank, which the caller has agreed on, at the owners. Collective.

        What was summed among the ranks that share shards already is summed over their replicas.
        """
        used = [one for one in self.trained if one.is_used]
        for dtype in dict.fromkeys(one.sum_dtype for one in used):
            members = [one for one in used if one.sum_dtype == dtype]
            device = collective_device(self._data_parallel_group)
            flat = torch.cat([self._share_of(one).to(device, dtype) for one in members])
            if group_size(self._data_parallel_group) > 1:
                flat = all_reduce_sum(flat, self._data_parallel_group)
            for one, part in zip(members, flat.split([one.parameter.numel() for one in members]), strict=True):
                one.parameter.grad = None
                one.sums = part.to(one.parameter.device) if self.is_own(one) else None

    def _share_of(self, member: WholeMember) -> torch.Tensor:
        """Returns what this rank adds to the sum."""
        gradient = member.parameter.grad
        share = torch.zeros_like(member.parameter) if gradient is None else gradient
        share = share.detach().reshape(-1).to(member.sum_dtype)
        return share if member.sums is None else share + member.sums

    def forget_gradients(self, *, keeps_use: bool = False) -> None:
        """Drops all gradients."""
        for one in self.members:
            one.parameter.grad = one.sums = None
            one.is_used = one.is_used and keeps_use

    @torch.no_grad()
    def spread(self, *, everything: bool = False) -> None:
        """Gives all ranks what the owners have updated. Collective.

        Args:
            everything: Also of parameters that nobody used.
        """
        if group_size(self._shard_group) == 1:
            return
        used = [one for one in self.trained if one.is_used or everything]
        for owner in sorted({one.owner for one in used}):
            _broadcast_from(owner, [one.parameter.detach() for one in used if one.owner == owner], self._shard_group)


def _broadcast_from(owner: int, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    members = list(tensors)
    for dtype in dict.fromkeys(one.dtype for one in members):
        alike = [one for one in members if one.dtype == dtype]
        joined = torch.cat([one.reshape(-1) for one in alike]).to(collective_device(group))
        broadcast([joined], group, source=owner)
        for one, part in zip(alike, joined.split([one.numel() for one in alike]), strict=True):
            one.copy_(part.view(one.shape))
