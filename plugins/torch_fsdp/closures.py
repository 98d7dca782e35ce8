"""Optimizer steps with a closure, as in LBFGS: one rank runs the optimizer, all ranks evaluate the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, broadcast, collective_device, group_rank, group_size

__all__ = ["run_closure_step"]

_OWNER = 0


def run_closure_step(
    step: Callable[[Callable[[], torch.Tensor]], Any],
    evaluate: Callable[[], torch.Tensor],
    broadcast_weights: Callable[[], None],
    *,
    shard_group: dist.ProcessGroup | None,
    data_parallel_group: dist.ProcessGroup | None,
) -> Any:
    """Run an optimizer step with a closure, and return its result on all ranks.

    An optimizer that needs all parameters at once runs on the first rank of the shard group. The closure is a forward
    and backward on data of all ranks. Each time the optimizer calls it, the first rank notifies the others. Then all
    ranks receive the current weights, evaluate, and reduce their gradients. The loss that the optimizer receives is the
    mean over all ranks, as in one process.

    Args:
        step: Step of the optimizer, called with a closure on the first rank of the shard group.
        evaluate: Computes the loss and sets the optimizer's gradients. Collective.
        broadcast_weights: Broadcasts the optimizer's weights to all ranks. Collective.
        shard_group: Group that the parameters are sharded over.
        data_parallel_group: Group that the data are divided over; None for the world group.

    Collective over the data-parallel ranks.
    """

    def evaluate_on_all_ranks() -> torch.Tensor:
        broadcast_weights()
        loss = evaluate().detach().float().reshape(1).to(collective_device(data_parallel_group))
        return (all_reduce_sum(loss, data_parallel_group) / group_size(data_parallel_group)).reshape(())

    if group_rank(shard_group) != _OWNER:
        return _run_without_optimizer(evaluate_on_all_ranks, broadcast_weights, shard_group)

    def closure_on_owner() -> torch.Tensor:
        _broadcast_flag(True, shard_group)
        return evaluate_on_all_ranks()

    result = step(closure_on_owner)
    _broadcast_flag(False, shard_group)
    broadcast_weights()
    return result


def _run_without_optimizer(
    evaluate_on_all_ranks: Callable[[], torch.Tensor],
    broadcast_weights: Callable[[], None],
    group: dist.ProcessGroup | None,
) -> Any:
    first: torch.Tensor | None = None
    while _broadcast_flag(False, group):
        loss = evaluate_on_all_ranks()
        first = loss if first is None else first
    broadcast_weights()
    return first


def _broadcast_flag(evaluates: bool, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([evaluates], dtype=torch.uint8, device=collective_device(group))
    broadcast([flag], group, source=_OWNER)
    return bool(flag.item())
