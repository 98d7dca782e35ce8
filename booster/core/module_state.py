"""What a forward may change in the modules of a model, saved and restored."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_ATTRIBUTES_OF_ALL = frozenset(vars(nn.Module()))  # hooks, parameters, submodules, ...


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore what a forward changes in the modules of a model.

    That is buffers, attributes, lists, dicts and sets in them, nested too, and random generators of the modules' own.
    The states of the global generators are the caller's, and so is what other objects hold.
    """
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    saved = _SavedValues()
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for buffer in model.buffers():
        saved.add(buffer)
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _ATTRIBUTES_OF_ALL}
        attributes.append((vars(module), own))
        for value in own.values():
            saved.add(value)
    try:
        yield
    finally:
        for held, before in (*buffers, *attributes):
            for name in held.keys() - before.keys() - _ATTRIBUTES_OF_ALL:
                del held[name]
            held.update(before)
        saved.restore()


class _SavedValues:
    """Content of values that are changed in place."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by `id`, so that each is saved once; kept, so that no other has its id
        self._undo: list[Callable[[], object]] = []

    def add(self, value: Any) -> None:
        """Save the content of a value, and of those in it; do nothing with values that have none to save."""
        if id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            undo = None if value.requires_grad else _undo_of_tensor(value)
        elif isinstance(value, (list, dict, set, deque)):
            undo = _undo_of_container(value)
        else:
            undo = _undo_of_generator(value)
        if undo is None:
            return
        self._seen[id(value)] = value
        self._undo.append(undo)
        if isinstance(value, (list, dict, set, deque)):
            for inner in value.values() if isinstance(value, dict) else value:
                self.add(inner)

    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _undo_of_tensor(tensor: torch.Tensor) -> Callable[[], object]:
    content = tensor.detach().clone()

    def undo() -> None:
        # Not if the version differs, which a batch norm leaves as it is; through `.data`: a graph may have saved it.
        if tensor.layout is not torch.strided:
            with torch.no_grad():
                tensor.copy_(content)
        elif tensor.shape == content.shape:
            tensor.data.copy_(content)
        else:
            tensor.data = content

    return undo


def _undo_of_container(container: Any) -> Callable[[], object]:
    content = copy.copy(container)

    def undo() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)

    return undo


def _undo_of_generator(generator: Any) -> Callable[[], object] | None:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        python_state = generator.getstate()
        return lambda: generator.setstate(python_state)
    if isinstance(generator, (np.random.Generator, np.random.RandomState)):
        bits: Any = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
        bits_state = bits.state
        return lambda: setattr(bits, "state", bits_state)
    return None
