"""What users' loops call and return, and the same calls by plain torch in one process, on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from booster.device import current_device

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Outcome:
    """What a loop ends with.

    Attributes:
        losses: Of every step, on this rank.
        models: The trained models by name, whose weights and buffers are compared.
        values: What else is equal on all ranks, such as generated tokens.
    """

    losses: list[float] = field(default_factory=list)
    models: dict[str, nn.Module] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def on_the_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in host memory."""
    return {name: one.detach().cpu().clone() for name, one in tensors.items()}


class OneProcess:
    """The methods of a Booster that loops call, by plain torch."""

    def __init__(self) -> None:
        self.plugin = SimpleNamespace(dp_size=1, dp_rank=0, dp_group=None, pp_size=1)
        self.device = current_device()
        self.initial: dict[int, dict[str, torch.Tensor]] = {}

    def boost(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        model.to(self.device)
        self.initial[id(model)] = on_the_host(model.state_dict())
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: Any, *, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], max_norm)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def gather_for_metrics(self, data: torch.Tensor) -> torch.Tensor:
        return data


def part(booster: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a batch."""
    return tensor.chunk(booster.plugin.dp_size)[booster.plugin.dp_rank]


def fit(booster: Any, model: Any, optimizer: Any, batch: Any, criterion: Loss) -> float:
    """Run forward and backward as scripts do that also train pipelines; return the loss."""
    if booster.plugin.pp_size > 1:
        return float(booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"])
    loss = criterion(model(**batch) if isinstance(batch, dict) else model(batch), batch)
    booster.backward(loss, optimizer)
    return float(loss.detach())


@torch.no_grad()
def evaluate(booster: Any, model: Any, batch: Any, criterion: Loss) -> float:
    """Return the loss of a batch, in evaluation mode."""
    model.eval()
    if booster.plugin.pp_size > 1:
        loss = booster.execute_pipeline(iter([batch]), model, criterion)["loss"]
    else:
        loss = criterion(model(**batch) if isinstance(batch, dict) else model(batch), batch)
    model.train()
    return float(loss)


def gathered(model: Any) -> AbstractContextManager[Any]:
    """Show full weights in the user's model where they are divided over data-parallel ranks."""
    return model.gathered() if hasattr(model, "gathered") else nullcontext()


def noise(step: int, *shape: int) -> torch.Tensor:
    """Return numbers of a step that are the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).to(current_device())


def update(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def sgd(parameters: Iterator[nn.Parameter] | list) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter] | list) -> torch.optim.Optimizer:
    """A large eps keeps gradients small that are rounding noise."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
