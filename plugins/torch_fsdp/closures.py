"""Optimizer steps with a closure, as in LBFGS: one rank runs the optimizer, all ranks evaluate the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, broadcast, collective_device, group_rank, group_size

__all__ = ["drive"]

_OWNER = 0


def drive(
    step: Callable[[Callable[[], torch.Tensor]], Any],
    evaluate: Callable[[], torch.Tensor],
    spread: Callable[[], None],
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
        spread: Broadcasts the optimizer's weights to all ranks. Collective.
        shard_group: Group that the parameters are sharded over.
        data_parallel_group: Group that the data are divided over; None for the world group.

    Collective over the data-parallel ranks.
    """

    def together() -> torch.Tensor:
        spread()
        loss = evaluate().detach().float().reshape(1).to(collective_device(data_parallel_group))
        return (all_reduce_sum(loss, data_parallel_group) / group_size(data_parallel_group)).reshape(())

    if group_rank(shard_group) != _OWNER:
        return _follow(together, spread, shard_group)

    def driving() -> torch.Tensor:
        _say(True, shard_group)
        return together()

    result = step(driving)
    _say(False, shard_group)
    spread()
    return result


def _follow(together: Callable[[], torch.Tensor], spread: Callable[[], None], group: dist.ProcessGroup | None) -> Any:
    first: torch.Tensor | None = None
    while _say(False, group):
        loss = together()
        first = loss if first is None else first
    spread()
    return first


def _say(goes_on: bool, group: dist.ProcessGroup | None) -> bool:
    word = torch.tensor([goes_on], dtype=torch.uint8, device=collective_device(group))
    broadcast([word], group, source=_OWNER)
    return bool(word.item())
