"""What tests of models under TorchFSDPPlugin share."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from gemini_models import (
    WIDTH,
    Block,
    square_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


ONE_LEVEL = pytest.mark.parametrize("strategy", ["full", slow("grad op"), slow("none")])


def grid(*values, fast):
    """Returns the product of lists as parameters; those that `fast` refuses are slow tests."""
    return [case if fast(*case) else slow(*case) for case in itertools.product(*values)]


class Routes(nn.Module):
    """Goes the way that it is told."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.head, self.extra = Block(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor, way: list[int], uses_extra: bool = False) -> torch.Tensor:
        x = self.trunk(x)
        for number in way:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(F.linear(x, self.extra.weight) if uses_extra else x)


def _own_branch(rank, step):
    return [(rank + step) % 5]


def _go(choose, variant):
    def iterate(model, x, backward, rank, step):
        way = choose(rank, step)
        if variant == "accumulated":
            backward(square_loss(model(x, way)))
            way = choose(rank + 1, step + 7)
        loss = square_loss(model(x, way, uses_extra=variant == "extra" and rank == step % 2))
        if variant == "two forwards":
            loss = loss + square_loss(model(-x, choose(rank + 2, step)))
        outputs = []
        if variant == "evaluated":
            with torch.no_grad():
                outputs = [model(x, choose(rank + 3, step)).clone()]
        backward(loss)
        return outputs

    return iterate
