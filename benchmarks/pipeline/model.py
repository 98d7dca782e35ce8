"""The stack of blocks that benchmarks/pipeline cuts into stages: no embedding and no head, so all cuts are even."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from _harness.gpt import Block, GPTSize
from torch import nn

__all__ = ["NUM_STAGES", "PIPELINE_SIZES", "Stack", "make_stack", "next_features_loss", "stack_batches"]

NUM_STAGES = 2
_NUM_BATCHES = 4  # they come again after that: a step must not wait for data

# A sample is a microbatch. Eight layers, so that two stages of two chunks each have two layers in every chunk.
PIPELINE_SIZES = {
    "tiny": GPTSize(width=32, layers=4, heads=2, vocabulary=1, sequence=16, samples=4),
    "512": GPTSize(width=512, layers=8, heads=8, vocabulary=1, sequence=256, samples=8),
}


class Stack(nn.Module):
    """Blocks one after the other, from features to features."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape (samples, tokens, width)."""
        for block in self.blocks:
            x = block(x)
        return x


def make_stack(size: GPTSize, seed: int = 0) -> Stack:
    """Returns a model whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return Stack([Block(size) for _ in range(size.layers)])


def stack_batches(size: GPTSize) -> Callable[[int], torch.Tensor]:
    """Returns a function that gives the batch of step i, of shape (samples, tokens, width), the same on all ranks."""
    shape = (_NUM_BATCHES, size.samples, size.sequence, size.width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return lambda index: x[index % _NUM_BATCHES]


def next_features_loss(outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error of telling each token's successor: the batch itself is the target."""
    return F.mse_loss(outputs[:, :-1], x[:, 1:])
