"""Batches and a loss that several of our own models take."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the mean cross entropy of `model(x)` against the classes `y`."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def vectors(*shape: int, num_classes: int) -> Callable[[int, torch.Generator], Batch]:
    """Returns a maker of batches: normal `x` of that shape per sample, and a class `y`."""

    def sample(num_samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(num_samples, *shape, generator=generator)
        return {"x": x, "y": torch.randint(num_classes, (num_samples,), generator=generator)}

    return sample
