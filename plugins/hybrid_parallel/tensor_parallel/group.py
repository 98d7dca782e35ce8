"""The tensor-parallel group and its state during a forward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import group_rank, group_size

from .rng import TensorParallelRNG
from .shard_spec import even_sizes

_Output = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Entry:
    """Outputs for one input tensor, which is referenced to keep its id unique."""

    x: torch.Tensor
    conditions: tuple[object, ...]
    outputs: dict[nn.Module, tuple[torch.Tensor, torch.Tensor | None, _Output]]


class PrecomputedOutputs:
    """Precomputed outputs of linear layers by input tensor.

    A region that gathers its input multiplies with the weights of the layers that read it as chunks arrive. A layer
    that is then called with this tensor takes its output from here. It computes the output itself if it is called with
    another tensor, a second time, or after its weight was replaced. It also does so if activation checkpointing started
    in between, as the recomputation would not find the output; this shows in the saved-tensor hooks or in the absence
    of a graph.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def put(self, x: torch.Tensor, outputs: Mapping[nn.Module, _Output]) -> None:
        """Store the outputs of linear layers for an input, until they are taken or forgotten.

        Args:
            x: Input that the layers will be called with.
            outputs: Functions by layer that return the output; each is called at most once.
        """
        by_layer = {layer: (layer.weight, layer.bias, output) for layer, output in outputs.items()}
        self._entries[id(x)] = _Entry(x, _conditions(x), by_layer)  # type: ignore[arg-type]

    def pop(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Remove and return a layer's output for an input, or None if it has to be computed."""
        entry = self._entries.get(id(x))
        if entry is None or entry.conditions != _conditions(x):
            return None
        weight, bias, output = entry.outputs.pop(layer, (None, None, None))
        if output is None or layer.weight is not weight or layer.bias is not bias:
            return None
        return output()

    def discard(self, x: object) -> None:
        """Drop the outputs of an input."""
        self._entries.pop(id(x), None)

    def clear(self) -> None:
        """Drop all outputs."""
        self._entries.clear()


def _conditions(x: torch.Tensor) -> tuple[object, ...]:
    """Return the input's version, whether grad mode is enabled, and the innermost saved-tensor hooks."""
    version = -1 if x.is_inference() else x._version
    return version, torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


_Copy = TypeVar("_Copy")
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, TensorParallelGroup] = weakref.WeakValueDictionary()


def group_of_number(number: int) -> TensorParallelGroup:
    """Return the group of a number; see `TensorParallelGroup.number`."""
    return _by_number[number]


class TensorParallelGroup:
    """A tensor-parallel process group. Deep copies of a layer share it.

    Args:
        group: The process group; optional, defaults to the world.
        sequence_mode: "split_gather" or "ring" if the sequence is sharded over the group between the layers; optional,
            defaults to replicated hidden states.

    Attributes:
        group: The process group, None for the world.
        size: Number of ranks.
        rank: This rank in the group.
        sequence_mode: As given.
        shards_sequence: Whether hidden states are sharded along the sequence between the layers.
        rng: RNG streams of this rank's parallel regions.
        sequence_length: Number of tokens of a full sequence in the running stack, set by its splitter.
        num_sequences: Number of sequences in the running stack, likewise.
        precomputed: Outputs of linear layers that were computed together with the gathering of their input.
        intercepts_random: Whether random functions are intercepted in the graph that is being traced.
        number: Number of the group in this process, for operators, which take no objects.
        traced_input: Last input of a region in a graph of torch.compile that is being traced.
        traced_copy: Its copy, for all layers that read it.
        traced_products: Layers that read the last input of a region in a graph, with their outputs for it.
        gathered: Key, tensor and gathered blocks of the last input of linear layers on a grid of ranks.
        traced_in_region: Whether the graph is in a region with sharded activations, outside of a sharded sequence.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, sequence_mode: str | None = None) -> None:
        self.group = group
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.sequence_mode = sequence_mode
        self.shards_sequence = sequence_mode is not None
        self.rng = TensorParallelRNG(self.rank, "tensor")
        self.sequence_length: int | None = None
        self.num_sequences = 1
        self.precomputed = PrecomputedOutputs()
        self.intercepts_random = False
        self.number = next(_numbers)
        _by_number[self.number] = self
        self.traced_input: torch.Tensor | None = None
        self.traced_copy: torch.Tensor | None = None
        self.traced_products: tuple[tuple[nn.Module, torch.Tensor], ...] = ()
        self.traced_in_region = False
        self.gathered: tuple[object, torch.Tensor, torch.Tensor] | None = None
        self._input: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._copy: object = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self

    def is_traceable(self, is_training: bool) -> bool:
        """Whether torch.compile can trace regions now.

        In training, random functions have to be intercepted, unless the sequence is sharded: then a stack has one
        stream of random numbers only.
        """
        if self.shards_sequence:
            return self.sequence_length is not None
        return self.size > 1 and (self.intercepts_random or not is_training)

    def token_sizes(self, *, is_flat: bool) -> list[int]:
        """Return each rank's number of tokens in the running stack: of a sequence, or of all if they are flattened.

        A rank that has none cannot tell them from a tensor.
        """
        if self.sequence_length is None:
            raise AssertionError("the length of the full sequence is not set")
        return [size * (self.num_sequences if is_flat else 1) for size in even_sizes(self.sequence_length, self.size)]

    def pop_traced_product(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's output if it is in `traced_products` for this input, once."""
        if x is not self.traced_input:
            return None
        for index, (known, product) in enumerate(self.traced_products):
            if known is layer:
                self.traced_products = (*self.traced_products[:index], *self.traced_products[index + 1 :])
                return product
        return None

    def end_traced_region(self) -> None:
        """Drop what the last region of a graph shares, as nothing may outlive the graph."""
        self.traced_input = self.traced_copy = None
        self.traced_products = ()

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
        self.gathered = None
        self.end_traced_region()
        self.intercepts_random = self.traced_in_region = False
        self.precomputed.clear()
        self.rng.leave()  # a region that an aborted forward left open
