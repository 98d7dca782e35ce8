"""Outputs of linear layers that a parallel region computed while gathering its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["PrecomputedOutputs"]

_Output = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Entry:
    """Outputs for one input tensor, which is referenced to keep its id unique."""

    x: torch.Tensor
    version: int
    saved_tensor_hooks: tuple[bool, Any]
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
        self._entries[id(x)] = _Entry(x, _version(x), _saved_tensor_hooks(), by_layer)  # type: ignore[arg-type]

    def pop(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Remove and return a layer's output for an input, or None if it has to be computed."""
        entry = self._entries.get(id(x))
        if entry is None or entry.version != _version(x) or entry.saved_tensor_hooks != _saved_tensor_hooks():
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


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _saved_tensor_hooks() -> tuple[bool, Any]:
    """Return whether grad mode is enabled, and the innermost saved-tensor hooks."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)
