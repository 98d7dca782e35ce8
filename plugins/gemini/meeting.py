"""Where the ranks agree on what they do together: each says what it needs and has, and all do the same for all."""

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
# A rank may use parts of a model that another one does not, as data decide, and then needs weights at a moment when the
# others need different ones or none. So no rank starts a collective alone. Whenever one needs chunks that it does not
# have, or has the gradients of a chunk complete, it goes to a *meeting*: a few numbers of every rank are gathered.
# From them each rank computes the same list of collectives: the reductions for which every rank is ready, then the
# gatherings that any rank wants. A rank that wanted nothing takes part for the others' sake. Who has come to the end of
# a forward or backward keeps meeting until all have. Ranks that do the same things meet as often as they would have
# communicated anyway; a meeting moves some 100 bytes, a chunk some 10 million.


class Phase(IntEnum):
    """What a rank is in the middle of."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What one rank says.

    Attributes:
        phase: What it is doing.
        wants: Chunks to be gathered, the most urgent first.
        num_ready: How many chunks, in the order of reductions, it has ready.
        is_closing: It has come to the end of its phase.
        has_leftovers: Gradients wait that arrived after their chunk was reduced, or whose chunk is not complete.
    """

    phase: Phase
    wants: tuple[int, ...] = ()
    num_ready: int = 0
    is_closing: bool = False
    has_leftovers: bool = False


class Meeting:
    """The ranks of a shard group.

    Args:
        group: On the CPU, so that nobody waits for an accelerator; None: the world.
        max_wants: How many chunks a rank can want at once.
    """

    def __init__(self, group: dist.ProcessGroup | None, max_wants: int) -> None:
        self.group = group
        self._max_wants = max_wants

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return group_size(self.group) == 1

    @property
    def max_wants(self) -> int:
        """How many chunks a rank can want at once."""
        return self._max_wants

    def hold(self, post: Post) -> list[Post]:
        """Returns what every rank says, in rank order. Collective over the group."""
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
            f"ranks {backward} have ended a backward while the others have ended a forward: {UNEVEN_CALLS}"
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
