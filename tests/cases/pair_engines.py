"""What test_pair.py runs in new processes: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def build_linear(rate: float = 0.1) -> Callable[[int], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(index: int) -> torch.Tensor:
        loss = model(torch.full((2, 4), 1.0 + index % 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_broken() -> Callable[[int], float]:
    raise ValueError("this engine is broken on purpose")


def build_broken_step() -> Callable[[int], float]:
    def step(index: int) -> float:
        raise ValueError(f"no batch {index}")

    return step


def build_hoarder(mebibytes: int) -> Callable[[int], float]:
    kept = []

    def step(index: int) -> float:
        kept.append(torch.ones(mebibytes * 2**18))
        return 0.0

    return step


def read_environment(name: str) -> str | None:
    return os.environ.get(name)


def leave_early() -> None:
    os._exit(3)
