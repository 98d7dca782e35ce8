"""Shared by tests of loops under TorchFSDPPlugin."""

from __future__ import annotations

import pytest
import torch
from gemini_models import WIDTH
from torch import nn


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


ONE_LEVEL = pytest.mark.parametrize("strategy", ["full", slow("grad op"), slow("none")])


def sgd(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


class Odd(nn.Module):
    """Sizes that no world divides, and parameters smaller than most worlds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.body(x) + self.offset
