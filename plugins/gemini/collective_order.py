"""Negotiation of the collective order of a shard group: every rank sends a request, and all derive the same list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch.distributed as dist

from booster.comm import all_gather_numbers, global_rank_of, group_size
from booster.errors import DesyncError
from booster.validation import UNEVEN_CALLS

# Note [Collective order]
# Control flow that depends on data may make a rank use modules that another rank skips, so ranks can need different
# chunks at the same time. Therefore no rank starts a collective alone. When a rank needs chunks that are not gathered,
# or when the gradients of a chunk are complete, it enters a negotiation: an all-gather of a few integers per rank.
# From these each rank computes the same list of collectives: first the reductions for which every rank is ready, then
# the all-gathers that any rank requests. Ranks without a request participate as well. A rank that has finished its
# forward or backward keeps negotiating until all have. Ranks with equal control flow negotiate as often as they would
# have communicated anyway. A negotiation moves some 100 bytes, a chunk some 10 million.


class PassKind(IntEnum):
    """The pass that a rank is running."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Request of one rank in a negotiation.

    Attributes:
        phase: The pass that the rank is running.
        gather_requests: Indices of the chunks to gather, the most urgent first.
        num_ready: Number of chunks, in the order of reductions, that are ready to be reduced.
        is_done: True at the end of the pass.
        has_late_grads: True if gradients arrived after the reduction of their chunk, or their chunk is incomplete.
    """

    phase: PassKind
    gather_requests: tuple[int, ...] = ()
    num_ready: int = 0
    is_done: bool = False
    has_late_grads: bool = False


class OrderNegotiation:
    """Negotiation between the ranks of a shard group.

    Args:
        group: Process group with a CPU backend, which avoids device syncs. None is the world group.
        max_gather_requests: Maximum number of chunks in one request.
    """

    def __init__(self, group: dist.ProcessGroup | None, max_gather_requests: int) -> None:
        self.group = group
        self.max_gather_requests = max_gather_requests

    def exchange(self, request: RankRequest) -> list[RankRequest]:
        """Return the requests of all ranks, in rank order. Collective over the group.

        Raises:
            DesyncError: Some ranks have finished a backward while the others have finished a forward.
        """
        if group_size(self.group) == 1:
            return [request]
        gather_requests = list(request.gather_requests[: self.max_gather_requests])
        gather_requests += [-1] * (self.max_gather_requests - len(gather_requests))
        numbers = [request.phase, request.num_ready, request.is_done, request.has_late_grads, *gather_requests]
        requests = [_request_from_row(row) for row in all_gather_numbers(numbers, self.group)]
        if all(post.is_done for post in requests) and len({post.phase for post in requests}) > 1:
            backward = [global_rank_of(rank, self.group) for rank, one in enumerate(requests) if one.phase]
            raise DesyncError(
                f"ranks {backward} have finished a backward while the others have finished a forward: {UNEVEN_CALLS}"
            )
        return requests


def _request_from_row(row: Sequence[int]) -> RankRequest:
    phase, num_ready, is_done, has_late_grads, *gather_requests = row
    return RankRequest(
        phase=PassKind(phase),
        gather_requests=tuple(chunk for chunk in gather_requests if chunk >= 0),
        num_ready=num_ready,
        is_done=bool(is_done),
        has_late_grads=bool(has_late_grads),
    )
