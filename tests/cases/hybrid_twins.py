"""A model under HybridParallelPlugin and its twin in one process, which sees the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from oracles.joined_slices import joined_over_ranks
from torch import nn
from zoo import Batch, get_model, split_batch

from booster import Booster
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors

# fp32 sums in another order over a few steps; the large eps of `adamw` keeps gradients that are rounding noise small.
RTOL, ATOL = 2e-4, 2e-6


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Twins:
    """The two models, their optimizers, and batches of which this rank has a part.

    Args:
        name: Of a model in the zoo, whose batches and loss are used.
        build: Makes the model instead, the same at every call.
        optimizer: Makes an optimizer for a model.
        **arguments: Of the plugin; fp32 where not given.

    Attributes:
        plain: The model that one process trains.
        model: The boosted model; `optimizer` is its boosted optimizer.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], nn.Module] | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **arguments,
    ) -> None:
        self.entry = get_model(name)
        self.plugin = HybridParallelPlugin(**{"precision": "fp32", "zero_bucket_size_in_m": 0.004, **arguments})
        self.booster = Booster(plugin=self.plugin)
        build = build or self.entry.build
        self.plain, raw = build().to(self.booster.device), build()
        self.initial = {name: tensor.clone().cpu() for name, tensor in self.plain.state_dict().items()}
        self.plain_optimizer = optimizer(self.plain)
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer(raw))

    def batch(self, step: int) -> tuple[Batch, Batch]:
        """Returns the batch of all ranks, and this rank's part."""
        whole = self.entry.make_batch(step, 2 * self.plugin.dp_size)
        whole = map_tensors(lambda tensor: tensor.to(self.booster.device), whole)
        return whole, split_batch(whole, self.plugin.dp_rank, self.plugin.dp_size)

    def backward(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the losses of the plain model and of the boosted one, of which this rank's part is there."""
        whole, part = self.batch(step)
        expected, found = self.entry.loss(self.plain, whole), self.entry.loss(self.model, part)
        expected.backward()
        self.booster.backward(found, self.optimizer)
        return expected.detach(), found.detach()

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: Iterable[int] = range(3)) -> Twins:
        for step in steps:
            self.backward(step)
            self.step()
        return self

    def assert_equal(self, rtol: float = RTOL, atol: float = ATOL) -> None:
        """Both moved, and to the same place. Collective."""
        expected = {name: tensor.cpu() for name, tensor in self.plain.state_dict().items()}
        torch.testing.assert_close(joined_over_ranks(self.model), expected, rtol=rtol, atol=atol)
        assert any(not torch.equal(tensor, self.initial[name]) for name, tensor in expected.items())
