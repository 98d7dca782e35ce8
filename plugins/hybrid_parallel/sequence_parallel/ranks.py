"""The ranks that share every sequence, and how their attention communicates."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from booster.comm import group_rank, group_size
from booster.plugins.hybrid_parallel.sequence_parallel.order import TokenOrder
from booster.plugins.hybrid_parallel.tensor_parallel.random_streams import SplitStream

__all__ = ["SequenceParallelRanks"]


class SequenceParallelRanks:
    """One rank's view of the ranks that got the same batch and hold different tokens of it.

    Attributes:
        group: The ranks.
        mode: "all_to_all" exchanges tokens for heads around attention (DeepSpeed Ulysses, Jacobs et al. 2023),
            "ring_attn" passes keys and values round (Ring Attention, Liu et al. 2023).
        size: How many ranks there are.
        rank: This one among them.
        streams: The random numbers of tokens that no other rank holds.
    """

    def __init__(self, group: dist.ProcessGroup | None, mode: Literal["all_to_all", "ring_attn"]) -> None:
        self.group = group
        self.mode = mode
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.streams = SplitStream(self.rank)

    def order_of(self, length: int) -> TokenOrder:
        """Returns where the tokens of a sequence of this length lie."""
        return TokenOrder(length, self.size, is_zigzag=self.mode == "ring_attn")

    def reset(self) -> None:
        """Forgets what an unfinished forward left behind."""
        self.streams.reset()

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceParallelRanks:
        return self
