"""Negotiation of the collective order of a shard group: every rank sends a request, and all derive the same list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, collective_device, global_rank_of, group_size
from booster.errors import DesyncError
from booster.plugins.sharding.checks import UNEVEN_CALLS

__all__ = ["Meeting", "Phase", "Post"]

# Note [Meetings]
# Control flow that depends on data may make a rank use modules that another rank skips, so ranks can need different
# chunks at the same time. Therefore no rank starts a collective alone. When a rank needs chunks that are not gathered,
# or when the gradients of a chunk are complete, it enters a negotiation: an all-gather of a few integers per rank.
# From these each rank computes the same list of collectives: first the reductions for which every rank is ready, then
# the all-gathers that any rank requests. Ranks without a request participate as well. A rank that has finished its
# forward or backward keeps negotiating until all have. Ranks with equal control flow negotiate as often as they would
# have communicated anyway. A negotiation moves some 100 bytes, a chunk some 10 million.


class Phase(IntEnum):
    """The pass that a rank is running."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Request of one rank in a negotiation.

    Attributes:
        phase: The pass that the rank is running.
        wants: Indices of the chunks to gather, the most urgent first.
        num_ready: Number of chunks, in the order of reductions, that are ready to be reduced.
        is_closing: True at the end of the pass.
        has_leftovers: True if gradients arrived after the reduction of their chunk, or their chunk is incomplete.
    """

    phase: Phase
    wants: tuple[int, ...] = ()
    num_ready: int = 0
    is_closing: bool = False
    has_leftovers: bool = False


class Meeting:
    """Negotiation between the ranks of a shard group.

    Args:
        group: Process group with a CPU backend, which avoids device syncs. None is the world group.
        max_wants: Maximum number of chunks in one request.
    """

    def __init__(self, group: dist.ProcessGroup | None, max_wants: int) -> None:
        self.group = group
        self._max_wants = max_wants

    @property
    def is_alone(self) -> bool:
        """Whether the group has a single rank."""
        return group_size(self.group) == 1

    @property
    def max_wants(self) -> int:
        """Maximum number of chunks in one request."""
        return self._max_wants

    def hold(self, post: Post) -> list[Post]:
        """Return the requests of all ranks, in rank order. Collective over the group."""
        if self.is_alone:
            return [post]
        wants = list(post.wants[: self._max_wants])
        wants += [-1] * (self._max_wants - len(wants))
        numbers = [post.phase, post.num_ready, post.is_closing, post.has_leftovers, *wants]
        own = torch.tensor([numbers], dtype=torch.int64, device=collective_device(self.group))
        posts = [_post_of(row) for row in all_gather_equal(own, self.group).tolist()]
        self._check(posts)
        return posts

    def _check(self, posts: Sequence[Post]) -> None:
        if not all(post.is_closing for post in posts) or len({post.phase for post in posts}) == 1:
            return
        backward = [global_rank_of(rank, self.group) for rank, post in enumerate(posts) if post.phase]
        raise DesyncError(
            f"ranks {backward} have finished a backward while the others have finished a forward: {UNEVEN_CALLS}"
        )


def _post_of(row: Sequence[int]) -> Post:
    phase, num_ready, is_closing, has_leftovers, *wants = row
    return Post(
        phase=Phase(phase),
        wants=tuple(chunk for chunk in wants if chunk >= 0),
        num_ready=num_ready,
        is_closing=bool(is_closing),
        has_leftovers=bool(has_leftovers),
    )
