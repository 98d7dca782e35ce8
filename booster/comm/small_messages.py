"""Small collectives over gloo as tagged point-to-point messages, which another call's messages never match.

Note [Small collectives]
Gloo matches collectives by their number, whatever they are: ranks at different calls exchange each other's bytes, or
abort the process where a message is longer than expected. Small collectives carry the values that ranks compare, and
are at stake just when ranks are at different calls: a rank that ran out of batches saves while others train. So they
are messages with a tag of their kind, number and length, as those of flat buffers (see Note [Shards]): a rank at a call
that the others don't make times out, with an error. Every rank sends to every rank, which costs no more than gloo's
ring for small messages and few ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from booster.comm.operation import CollectiveOp

__all__ = ["p2p_all_gather", "p2p_all_reduce", "p2p_broadcast", "use_p2p"]

_MAX_BYTES = 64 * 2**10
_MAX_RANKS = 64
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def use_p2p(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether a collective of this tensor without shared memory is made of point-to-point messages."""
    is_small = tensor.nbytes <= _MAX_BYTES and dist.get_world_size(group) <= _MAX_RANKS
    is_by_gloo = tensor.device.type == "cpu" and "gloo" in str(dist.get_backend(group))
    # In this mode torch compares all calls itself, and counts messages: a broadcast's differ between ranks.
    is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return is_small and is_by_gloo and not is_checked


def p2p_all_gather(operation: CollectiveOp, joined: torch.Tensor, source: torch.Tensor) -> None:
    """Fill `joined` with the ranks' tensors of one shape, concatenated along dim 0. Both are contiguous."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    rows = joined.view(size, -1)
    mine = source.view(-1)
    rows[rank].copy_(mine)
    if mine.numel() == 0:
        return
    others, tag = [other for other in range(size) if other != rank], operation.small_tag(mine.nbytes)
    _wait_all(
        operation,
        [operation.receive_from(rows[other], other, tag) for other in others]
        + [operation.send_to(mine, other, tag) for other in others],
    )


def p2p_all_reduce(operation: CollectiveOp, tensor: torch.Tensor, operator: Literal["sum", "max"]) -> None:
    """Reduce a contiguous tensor in place, in rank order, to equal bits on every rank; 16-bit dtypes in fp32."""
    rows = tensor.new_empty((dist.get_world_size(operation.group), tensor.numel()))
    p2p_all_gather(operation, rows, tensor)
    total = rows[0].float() if tensor.dtype in _LOW_PRECISION else rows[0]
    for row in rows[1:]:
        if operator == "sum":
            total += row
        else:
            torch.maximum(total, row.to(total.dtype), out=total)
    tensor.view(-1).copy_(total)


def p2p_broadcast(operation: CollectiveOp, buffer: torch.Tensor, source: int) -> None:
    """Overwrite a contiguous tensor with that of rank `source` of the group."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    flat, tag = buffer.view(-1), operation.small_tag(buffer.nbytes)
    if rank == source:
        others = [other for other in range(size) if other != rank]
        _wait_all(operation, [operation.send_to(flat, other, tag) for other in others])
    else:
        _wait_all(operation, [operation.receive_from(flat, source, tag)])


def _wait_all(operation: CollectiveOp, works: Sequence[dist.Work]) -> None:
    for work in works:
        operation.wait(work)
