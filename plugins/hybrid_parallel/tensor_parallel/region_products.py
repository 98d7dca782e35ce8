"""What a parallel region has computed of its input before the layers that are to return it are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["RegionProducts"]

# Note [Products that wait]
# Where a region gathers its input, the layers that will read it are known, and are multiplied with it as it arrives. A
# layer that is then called with that very tensor takes its product; with anything else, a second time, or after its
# weight was exchanged, it multiplies. So it does where activation checkpointing has begun since, whose second forward
# would not find the product: that shows in how tensors are saved, or in that there is no graph.


_Product = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Waiting:
    """Products of one tensor; it is kept, as another one may have its identity after its end."""

    x: torch.Tensor
    version: int
    saving: tuple[bool, Any]
    products: dict[nn.Module, tuple[torch.Tensor, torch.Tensor | None, _Product]]


class RegionProducts:
    """Products that wait for their layers; see Note [Products that wait]."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def keep(self, x: torch.Tensor, products: Mapping[nn.Module, _Product]) -> None:
        """Keeps what linear layers make of a tensor, until they take it or the tensor is forgotten.

        Args:
            x: What they will be called with.
            products: By layer, functions of which the one that a layer takes is called once.
        """
        by_layer = {layer: (layer.weight, layer.bias, product) for layer, product in products.items()}
        self._waiting[id(x)] = _Waiting(x, _version(x), _saving(), by_layer)  # type: ignore[arg-type]

    def take(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Returns what a layer makes of the tensor that it is called with, if that waits for it."""
        waiting = self._waiting.get(id(x))
        if waiting is None or waiting.version != _version(x) or waiting.saving != _saving():
            return None
        weight, bias, product = waiting.products.pop(layer, (None, None, None))
        if product is None or layer.weight is not weight or layer.bias is not bias:
            return None
        return product()

    def forget(self, x: object) -> None:
        """Lets go of what waits of a tensor."""
        self._waiting.pop(id(x), None)

    def clear(self) -> None:
        """Lets go of everything."""
        self._waiting.clear()


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _saving() -> tuple[bool, Any]:
    """Returns whether there is a graph now, and how it saves tensors."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)
