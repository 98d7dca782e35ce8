"""Bytes from one rank to another, over a group that no other code communicates on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from booster.comm.collectives import global_rank_of, group_size

__all__ = ["new_cpu_group", "receive", "send"]


def new_cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Returns a new gloo group of the same ranks, so that a thread can use it beside the training's collectives.

    Collective: every rank of the group must call it.
    """
    ranks = [global_rank_of(rank, group) for rank in range(group_size(group))]
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
    return made


def send(tensor: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> None:
    """Sends a CPU tensor to a rank of the group, and returns when it may be changed."""
    dist.send(tensor, dst=global_rank_of(receiver, group), group=group)


def receive(tensor: torch.Tensor, sender: int, group: dist.ProcessGroup) -> None:
    """Fills a CPU tensor with what a rank of the group sends."""
    dist.recv(tensor, src=global_rank_of(sender, group), group=group)
