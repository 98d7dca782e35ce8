"""Network and batch of the benchmark."""

from __future__ import annotations

import torch
from torch import nn

from booster.benchmark.settings import INNER_FACTOR, BenchmarkSettings

__all__ = ["PerceptronLayer", "make_batch", "make_network"]

_SEED = 1024


class PerceptronLayer(nn.Module):
    """MLP block of a transformer, with residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(hidden, INNER_FACTOR * hidden)
        self.down: nn.Module = nn.Linear(INNER_FACTOR * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations of the shape of x; elementwise except for the linear layers, so any sharding works."""
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + inner


def make_network(settings: BenchmarkSettings) -> nn.Sequential:
    """Return the unsharded network with the same weights on every rank, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return nn.Sequential(*(PerceptronLayer(settings.hidden) for _ in range(settings.layers)))


def make_batch(settings: BenchmarkSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the global batch, (batch * sequence, hidden), the same on every rank, on the CPU."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    inputs, targets = torch.randn(2, settings.rows, settings.hidden, generator=generator)
    return inputs, targets
