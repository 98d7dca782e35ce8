"""Every scheduler of booster.lr_scheduler in a few settings, and runs of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster import lr_scheduler as ours

Make = Callable[[Optimizer], LRScheduler]
N = 12


class Halves:
    """A factor with a state: each instance may begin elsewhere."""

    def __init__(self, period: int) -> None:
        self.period = period

    def __call__(self, step: int) -> float:
        return 0.5 ** (step // self.period)


def _tenths(step: int) -> float:
    return 1.0 - step / 20


CASES: dict[str, Make] = {
    "cosine": lambda o: ours.CosineAnnealingLR(o, N),
    "cosine to a floor": lambda o: ours.CosineAnnealingLR(o, N, 0.01),
    "cosine after warm-up": lambda o: ours.CosineAnnealingWarmupLR(o, N, 5, 0.01),
    "cosine after no warm-up": lambda o: ours.CosineAnnealingWarmupLR(o, N),
    "flat": lambda o: ours.FlatAnnealingLR(o, N),
    "flat after warm-up": lambda o: ours.FlatAnnealingWarmupLR(o, N, 2, 0.5, 0.01),
    "linear": lambda o: ours.LinearWarmupLR(o, N, 3),
    "milestones": lambda o: ours.MultiStepLR(o, N, [2, 7, 7]),
    "milestones after warm-up": lambda o: ours.MultiStepWarmupLR(o, N, 2, (2, 7), 0.5),
    "one cycle": lambda o: ours.OneCycleLR(o, N),
    "one cycle of lines": lambda o: ours.OneCycleLR(o, N, 0.5, "linear", cycle_momentum=False),
    "polynomial": lambda o: ours.PolynomialLR(o, N, power=2.0),
    "polynomial to zero": lambda o: ours.PolynomialLR(o, N, 0.0, 0.9),
    "polynomial after warm-up": lambda o: ours.PolynomialWarmupLR(o, N, 4, power=0.5),
    "function": lambda o: ours.LambdaLR(o, N, lambda step: 0.9**step),
    "objects": lambda o: ours.LambdaLR(o, N, [Halves(2 + index) for index in range(len(o.param_groups))]),
    "factors": lambda o: ours.MultiplicativeLR(o, N, lambda step: 1 - 0.1 / step),
    "partial": lambda o: ours.MultiplicativeLR(o, N, functools.partial(_tenths)),
    "steps": lambda o: ours.StepLR(o, N, 5, 0.3),
    "exponential": lambda o: ours.ExponentialLR(o, N, 0.7),
}


def optimizer(lrs: Iterable[float | Tensor] = (0.1, 0.03), kind: type[Optimizer] = SGD) -> Optimizer:
    """Returns an optimizer with a param group for each learning rate."""
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs]
    return SGD(groups, momentum=0.9) if kind is SGD else kind(groups)


def take(scheduler: LRScheduler, num_steps: int) -> list[list[float]]:
    """Takes steps; returns the learning rates that each of them left, and first those before."""
    seen = [hyperparameters(scheduler.optimizer)]
    for _ in range(num_steps):
        scheduler.optimizer.step()
        scheduler.step()
        seen.append(hyperparameters(scheduler.optimizer))
    return seen


def hyperparameters(of: Optimizer) -> list[float]:
    """Returns the learning rate and the momentum of every group."""
    values = [float(group["lr"]) for group in of.param_groups]
    return values + [float(group.get("momentum", group.get("betas", (0,))[0])) for group in of.param_groups]


def learning_rates(make: Make, num_steps: int, lr: float | Tensor = 1.0) -> list[float]:
    """Returns the learning rates of so many steps of one group, and the one after them."""
    return [seen[0] for seen in take(make(optimizer([lr])), num_steps)]


def jump(scheduler: LRScheduler, num_steps: int) -> None:
    """Goes to a step by torch's old way."""
    scheduler.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is deprecated
        scheduler.step(num_steps)
