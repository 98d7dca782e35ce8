"""The sequence-parallel group, and the sharding of a sequence's tokens over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from booster.comm import group_rank, group_size
from booster.plugins.hybrid_parallel.tensor_parallel.rng import TensorParallelRNG
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import even_range

# Note [Zigzag order]
# Plain: P ranks hold P chunks in order. Zigzag: the sequence has 2P chunks, and rank r holds chunk r followed by chunk
# 2P - 1 - r. This balances causal attention, because early chunks attend to few keys and late chunks to many. If the
# length is not divisible, the first chunks have one more token; with fewer tokens than chunks the last chunks are
# empty. There is no padding.
#
# Note [Short sequences]
# With fewer tokens than ranks, as where a decoder starts to generate, some ranks would have none, which models can't
# compute: `view(batch, -1, heads, features)` is ambiguous without elements. So every rank computes all tokens.


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """Sharding of one sequence's tokens; see Note [Zigzag order].

    Attributes:
        length: Tokens of the full sequence.
        num_ranks: Number of ranks.
        is_zigzag: Whether the order is zigzag.
    """

    length: int
    num_ranks: int
    is_zigzag: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all tokens; see Note [Short sequences]."""
        return self.length < self.num_ranks

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return start and end (exclusive) of each of the rank's chunks, in its local order."""
        if self.is_replicated:
            return ((0, self.length),)
        if not self.is_zigzag:
            return (even_range(self.length, self.num_ranks, rank),)
        count = 2 * self.num_ranks
        return even_range(self.length, count, rank), even_range(self.length, count, count - 1 - rank)

    def local_length(self, rank: int) -> int:
        """Return the rank's number of tokens."""
        return sum(stop - start for start, stop in self.chunks(rank))

    def local_lengths(self) -> list[int]:
        """Return each rank's number of tokens."""
        return [self.local_length(rank) for rank in range(self.num_ranks)]

    def shard(self, full: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return the rank's tokens of a tensor whose dimension `dim` is the full sequence."""
        chunks: list[torch.Tensor] = [full.narrow(dim, start, stop - start) for start, stop in self.chunks(rank)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the full sequence in its original order from all ranks' tokens, ordered by rank."""
        if self.is_replicated:
            return shards[0]
        chunks = [
            (full.start, shard.narrow(dim, local.start, local.stop - local.start))
            for rank, shard in enumerate(shards)
            for local, full in self.local_chunks(rank)
        ]
        chunks.sort(key=lambda placed: placed[0])
        return torch.cat([chunk for _, chunk in chunks], dim)

    def local_chunks(self, rank: int) -> list[tuple[slice, slice]]:
        """Return the ranges of each of the rank's chunks in its local tokens and in the full sequence."""
        ranges, offset = [], 0
        for start, stop in self.chunks(rank):
            ranges.append((slice(offset, offset + stop - start), slice(start, stop)))
            offset += stop - start
        return ranges


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
