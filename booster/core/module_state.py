"""What a forward may change in the modules of a model, saved and restored."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ATTRIBUTES_OF_ALL = frozenset(vars(nn.Module()))  # hooks, parameters, submodules, ...


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore what a forward changes in the modules of a model: buffers, attributes, and lists, dicts and sets in them.

    The states of random generators are the caller's.
    """
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    containers: list[tuple[Any, Any]] = []
    tensors = dict.fromkeys(model.buffers())
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _ATTRIBUTES_OF_ALL}
        attributes.append((vars(module), own))
        containers += [(one, copy.copy(one)) for one in own.values() if isinstance(one, (list, dict, set, deque))]
        tensors |= dict.fromkeys(one for one in own.values() if isinstance(one, torch.Tensor) and not one.requires_grad)
    before = [(one, one.detach().clone()) for one in tensors]
    try:
        yield
    finally:
        for held, buffers in places:
            held.clear()
            held.update(buffers)
        for held, own in attributes:
            for name in held.keys() - own.keys() - _ATTRIBUTES_OF_ALL:
                del held[name]
            held.update(own)
        for container, content in containers:
            if container != content or len(container) != len(content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, value in before:
            if not torch.equal(tensor, value):  # not by the version, which a batch norm leaves as it is
                tensor.data.copy_(value)  # which leaves it, too: a graph may have saved the tensor
