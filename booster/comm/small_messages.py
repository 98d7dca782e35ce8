"""Small collectives by gloo as messages between each two ranks, which can't be taken for those of another call.

Note [Small collectives]
Gloo numbers its collectives and matches those of one number, whatever they are: ranks that make different calls take
each other's bytes, or, where those are more than expected, end the process. What ranks agree about by small collectives
is just what differs when some are at another place: a rank that ran out of batches saves while others train. So small
ones are messages with a tag of their kind, number and length, much as flat buffers are (see Note [Pieces]): who waits
for a call that others don't make waits until its time is up, and says so. Each rank sends to each, which costs no more
than gloo's own ring as long as messages are small and ranks are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from booster.comm.operation import Operation

__all__ = ["all_gather_by_messages", "all_reduce_by_messages", "broadcast_by_messages", "goes_by_messages"]

_MOST_BYTES = 64 * 2**10
_MOST_RANKS = 64
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def goes_by_messages(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Returns whether a collective of this tensor, which no shared memory takes, is to be made of messages."""
    is_small = tensor.nbytes <= _MOST_BYTES and dist.get_world_size(group) <= _MOST_RANKS
    is_by_gloo = tensor.device.type == "cpu" and "gloo" in str(dist.get_backend(group))
    # There torch compares all calls itself, and counts messages: a broadcast has not as many on all ranks.
    is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return is_small and is_by_gloo and not is_checked


def all_gather_by_messages(operation: Operation, joined: torch.Tensor, source: torch.Tensor) -> None:
    """Fills `joined` with the ranks' tensors of one shape, joined along dimension 0. Both are contiguous."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    rows = joined.view(size, -1)
    mine = source.view(-1)
    rows[rank].copy_(mine)
    if mine.numel() == 0:
        return
    others, tag = [other for other in range(size) if other != rank], operation.tag_of_small(mine.nbytes)
    _finish(
        operation,
        [operation.receive_from(rows[other], other, tag) for other in others]
        + [operation.send_to(mine, other, tag) for other in others],
    )


def all_reduce_by_messages(operation: Operation, tensor: torch.Tensor, operator: Literal["sum", "max"]) -> None:
    """Reduces a contiguous tensor in place, from rank 0 on, to the same bits on every rank; 16-bit formats in fp32."""
    rows = tensor.new_empty((dist.get_world_size(operation.group), tensor.numel()))
    all_gather_by_messages(operation, rows, tensor)
    total = rows[0].float() if tensor.dtype in _LOW_PRECISION else rows[0]
    for row in rows[1:]:
        if operator == "sum":
            total += row
        else:
            torch.maximum(total, row.to(total.dtype), out=total)
    tensor.view(-1).copy_(total)


def broadcast_by_messages(operation: Operation, buffer: torch.Tensor, source: int) -> None:
    """Overwrites a contiguous tensor with that of rank `source` of the group."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    flat, tag = buffer.view(-1), operation.tag_of_small(buffer.nbytes)
    if rank == source:
        others = [other for other in range(size) if other != rank]
        _finish(operation, [operation.send_to(flat, other, tag) for other in others])
    else:
        _finish(operation, [operation.receive_from(flat, source, tag)])


def _finish(operation: Operation, works: Sequence[dist.Work]) -> None:
    for work in works:
        operation.wait(work)
