"""The sequence-parallel group."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from booster.comm import group_rank, group_size
from booster.plugins.hybrid_parallel.tensor_parallel.rng import TensorParallelRNG

from .zigzag import SequenceSharding


class SequenceParallelGroup:
    """A process group of ranks that hold different tokens of the same batch.

    Attributes:
        group: The process group.
        mode: "all_to_all" exchanges tokens for heads around attention (DeepSpeed Ulysses, Jacobs et al. 2023),
            "ring_attn" passes keys and values in a ring (Ring Attention, Liu et al. 2023).
        size: Number of ranks.
        rank: This rank in the group.
        rng: RNG state of this rank's tokens.
    """

    def __init__(self, group: dist.ProcessGroup | None, mode: Literal["all_to_all", "ring_attn"]) -> None:
        self.group = group
        self.mode = mode
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.rng = TensorParallelRNG(self.rank)

    def sharding_of(self, length: int) -> SequenceSharding:
        """Return the sharding of a sequence of this length."""
        return SequenceSharding(length, self.size, is_zigzag=self.mode == "ring_attn")

    def reset(self) -> None:
        """Reset the state of an aborted forward."""
        self.rng.leave()

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceParallelGroup:
        return self
