"""Steps that compute the loss several times, as LBFGS does: one rank runs the optimizer, and all compute for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, broadcast, collective_device, group_rank, group_size

__all__ = ["drive"]

# Note [Driving a closure]
# An optimizer that needs all parameters at once has them on the first rank of those that share shards. Its closure is
# the user's: a forward and backward over data that are divided among all ranks. Whenever the optimizer calls it, the
# first rank tells the others so; then all take over the weights as the optimizer has set them, compute, and bring their
# gradients together. The loss that the optimizer sees is the mean over all ranks, which is that of one process.

_OWNER = 0


def drive(
    step: Callable[[Callable[[], torch.Tensor]], Any],
    evaluate: Callable[[], torch.Tensor],
    spread: Callable[[], None],
    *,
    shard_group: dist.ProcessGroup | None,
    data_parallel_group: dist.ProcessGroup | None,
) -> Any:
    """Returns what the optimizer's step does, on all ranks; see Note [Driving a closure].

    Args:
        step: The optimizer's, called with a closure on the first rank of the shard group.
        evaluate: Computes the loss, and leaves gradients with the optimizer. Collective.
        spread: Gives all ranks the weights that the optimizer has set. Collective.
        shard_group: The ranks that share the shards.
        data_parallel_group: The ranks among which data are divided; None: the world.

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
    """Returns what the first rank says."""
    word = torch.tensor([goes_on], dtype=torch.uint8, device=collective_device(group))
    broadcast([word], group, source=_OWNER)
    return bool(word.item())
