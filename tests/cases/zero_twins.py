"""A model under LowLevelZeroPlugin and its twin in one process, which sees the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from booster.device import current_device
from booster.plugins import LowLevelZeroPlugin

TINY_BUCKETS = 1e-6  # the smallest that there are: one aligned shard a rank


def mlp() -> nn.Module:
    """Sizes that no world divides; the last bias is smaller than most worlds."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The large eps keeps gradients that are rounding noise small, as in oracles.serial_training.
    return torch.optim.AdamW(trained(model), lr=0.01, eps=1e-3, weight_decay=0.1)


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x.to(next(model.parameters()).device)) - 1).square().mean()  # before boost it may be the host's


class Twins:
    """The two models, their optimizers, and batches of which this rank has a part.

    Args:
        build: Makes the same model at every call.
        optimizer: Makes an optimizer for a model.
        loss: Mean over the samples of a batch.
        **arguments: Of the plugin; fp32 and tiny buckets where not given.

    Attributes:
        plain: The model that one process trains.
        raw: The model to boost; `user_optimizer` is its optimizer.
        model: The boosted model, after `boost`; `optimizer` is its boosted optimizer.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = mlp,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = square_loss,
        **arguments,
    ) -> None:
        self.loss = loss
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        arguments = {"precision": "fp32", "reduce_bucket_size_in_m": TINY_BUCKETS, **arguments}
        self.booster = Booster(plugin=LowLevelZeroPlugin(**arguments))
        self.plain, self.raw = build().to(current_device()), build()
        self.plain_optimizer, self.user_optimizer = optimizer(self.plain), optimizer(self.raw)
        self.initial = {name: tensor.clone() for name, tensor in self.plain.state_dict().items()}

    def boost(self) -> Twins:
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, self.user_optimizer)
        return self

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the batch of all ranks, and this rank's part."""
        whole = torch.randn(4 * self.size, 7, generator=torch.Generator().manual_seed(step)).to(current_device())
        return whole, whole[4 * self.rank : 4 * (self.rank + 1)]

    def backward(self, step: int) -> None:
        whole, part = self.batch(step)
        self.loss(self.plain, whole).backward()
        self.booster.backward(self.loss(self.model, part), self.optimizer)

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: Iterable[int] = range(3)) -> Twins:
        for step in steps:
            self.backward(step)
            self.step()
        return self

    def assert_equal(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Both moved, and to the same place: a few steps' sums in fp32, in another order."""
        expected = dict(self.plain.state_dict())
        torch.testing.assert_close(dict(self.model.state_dict()), expected, rtol=rtol, atol=atol)
        assert any(not torch.equal(tensor, self.initial[name]) for name, tensor in expected.items())
