"""The tensor-parallel group and its state during a forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from booster.comm import group_rank, group_size
from booster.plugins.hybrid_parallel.tensor_parallel.random_streams import TensorParallelRNG
from booster.plugins.hybrid_parallel.tensor_parallel.region_products import PrecomputedOutputs

__all__ = ["TensorParallelGroup"]

_Copy = TypeVar("_Copy")


class TensorParallelGroup:
    """A tensor-parallel process group. Deep copies of a layer share it.

    Args:
        group: The process group; optional, defaults to the world.
        sequence_mode: "split_gather" or "ring" if the sequence is sharded over the group between the layers; optional,
            defaults to replicated hidden states.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, sequence_mode: str | None = None) -> None:
        self.group = group
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.sequence_mode = sequence_mode
        self.rng = TensorParallelRNG(self.rank, "tensor")
        self.sequence_length: int | None = None
        """Number of tokens of the full sequence in the running stack, set by its splitter."""
        self.precomputed = PrecomputedOutputs()
        self._input: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._copy: object = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self

    @property
    def shards_sequence(self) -> bool:
        """Whether hidden states are sharded along the sequence between the layers."""
        return self.sequence_mode is not None

    def shared_input(self, x: torch.Tensor, kind: type[_Copy], make: Callable[[torch.Tensor], _Copy]) -> _Copy:
        """Return `make(x)`, cached while consecutive calls pass the same tensor object.

        Query, key and value projections read one tensor, whose gradient is the sum of all three, all-reduced. Layers
        called with the same tensor share one copy of it, so that autograd adds up their gradients before a single
        all-reduce. Only the last copy is cached, because such layers are called consecutively, and only during a
        forward, because it references the graph.

        Args:
            x: Input of several layers.
            kind: Type that `make` returns.
            make: Function called for the first of them.
        """
        is_same = self._input is not None and self._input() is x and self._version == x._version
        if is_same and isinstance(self._copy, kind):
            return self._copy
        copy = make(x)
        self._copy, self._input, self._version = copy, weakref.ref(x), x._version
        return copy

    def reset(self) -> None:
        """Drop shared inputs and open regions, at the start and end of a forward and after backward."""
        self._input, self._copy = None, None
        self.precomputed.clear()
        self.rng.reset()
