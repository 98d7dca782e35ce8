"""Models that are fed a whole batch, and a criterion that does the rest: what a pipeline asks for.

`ZooEntry.loss` calls the model with a part of the batch and compares with another. Here it is taken apart at that call.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from zoo.entry import Batch, ZooEntry

__all__ = ["WholeBatches"]


class WholeBatches:
    """A model of the zoo, its batches as an iterator gives them, and its criterion."""

    def __init__(self, entry: ZooEntry) -> None:
        self.entry = entry
        batch = entry.make_batch(0, 2)
        arguments, named = self._arguments(batch)
        # An nn.Sequential takes nothing but its only argument; models of transformers take their labels, too.
        self.is_bare = len(batch) == len(arguments) == 1 and arguments[0] is next(iter(batch.values()))
        self.fits = self.is_bare or (not arguments and named.keys() == batch.keys())
        self.names = tuple(batch)

    def build(self) -> nn.Module:
        """Returns the model; where it asks for a part of the batch, with a forward that takes all of it by name."""
        model = self.entry.build()
        if self.fits:
            return model
        kind = type(model)

        def forward(module: nn.Module, **batch: torch.Tensor) -> Any:
            arguments, named = self._arguments(batch)
            return kind.forward(module, *arguments, **named)

        model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
        return model

    def feed(self, batch: Batch) -> Any:
        """Returns a batch of the entry as the model takes it: its only argument, or all by name."""
        return batch[self.names[0]] if self.is_bare else batch

    def criterion(self, outputs: Any, fed: Any) -> torch.Tensor:
        """Returns the loss that the entry makes of a model's outputs for what it was fed."""
        batch = {self.names[0]: fed} if self.is_bare else dict(fed)
        return self.entry.loss(lambda *_, **__: outputs, batch)  # type: ignore[arg-type]

    def num_samples(self, fed: Any) -> int:
        """Returns how many samples were fed."""
        return len(fed) if self.is_bare else len(fed[self.names[0]])

    def _arguments(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what the entry's loss calls its model with."""
        try:
            self.entry.loss(_call, batch)  # type: ignore[arg-type]
        except _CalledError as called:
            return called.arguments, called.named
        raise AssertionError(f"the loss of {self.entry.name} doesn't call the model")


class _CalledError(Exception):
    """The loss has called its model: with what."""

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.named = arguments, named


def _call(*arguments: Any, **named: Any) -> NoReturn:
    raise _CalledError(arguments, named)
