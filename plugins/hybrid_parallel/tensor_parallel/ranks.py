"""The ranks that share a model's layers, and what they remember during one forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from booster.comm import group_rank, group_size
from booster.plugins.hybrid_parallel.tensor_parallel.random_streams import SplitStream
from booster.plugins.hybrid_parallel.tensor_parallel.region_products import RegionProducts

__all__ = ["TensorParallelRanks"]

_Copy = TypeVar("_Copy")

# Note [Shared inputs]
# Query, key and value projections read one tensor, whose gradient is the sum over ranks of what each of them adds. One
# all-reduce of the sum is enough. So the layers that are called with the very same tensor share one copy of it, at
# which the contributions meet before they go to the other ranks. Only the last copy is kept, as layers that share an
# input are called one after the other; and none beyond a forward, as a copy holds on to its graph.


class TensorParallelRanks:
    """The ranks of a tensor-parallel group. A deep copy of a layer keeps working with the same ranks.

    Args:
        group: None: the world.
        sequence_mode: "split_gather" or "ring" where the sequence is split over these ranks between the layers; None:
            hidden states are replicated.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, sequence_mode: str | None = None) -> None:
        self.group = group
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.sequence_mode = sequence_mode
        self.streams = SplitStream(self.rank, "tensor")
        self.sequence_length: int | None = None
        """Tokens of the whole sequence of the stack that runs now, set by who splits it."""
        self.products = RegionProducts()
        self._input: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._copy: object = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelRanks:
        return self

    @property
    def splits_sequence(self) -> bool:
        """Whether hidden states are split along the sequence between the layers."""
        return self.sequence_mode is not None

    def shared(self, x: torch.Tensor, kind: type[_Copy], make: Callable[[torch.Tensor], _Copy]) -> _Copy:
        """Returns `make(x)`, or what that returned for the last call if it was with the very same tensor.

        Args:
            x: What several layers read.
            kind: What `make` returns.
            make: Called for the first of them.
        """
        is_same = self._input is not None and self._input() is x and self._version == x._version
        if is_same and isinstance(self._copy, kind):
            return self._copy
        copy = make(x)
        self._copy, self._input, self._version = copy, weakref.ref(x), x._version
        return copy

    def reset(self) -> None:
        """Forgets shared inputs and open regions: at the start and the end of a forward, and after backward."""
        self._input, self._copy = None, None
        self.products.clear()
        self.streams.reset()
