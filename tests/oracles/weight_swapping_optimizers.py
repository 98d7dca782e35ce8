"""Optimizers that write weights in other methods than step(), as third parties write them; all are elementwise."""

from __future__ import annotations

import torch
from torch.optim import SGD, Optimizer


class ScheduleFreeSGD(Optimizer):
    """Defazio et al. 2024: `eval` shows the average of the iterates, `train` the point to take gradients at.

    As the package schedulefree, whose step() asks for `train` first.
    """

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        self._swap(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self):
        self._swap(True, lambda beta: 1 - beta)

    def _swap(self, mode, weight):
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] is not mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight=weight(group["beta"]))
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, weight=1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


class SignSAM(SGD):
    """Sharpness-aware: `first_step` moves weights along the gradient's sign, `second_step` back, and steps there.

    Like most implementations of SAM it keeps the old weights in its state, gives them back by `p.data =`, clears the
    gradients in both, and is never stepped otherwise.
    """

    rho = 0.05

    @torch.no_grad()
    def first_step(self):
        for parameter in self._with_gradient():
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad.sign(), alpha=self.rho)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter in self._with_gradient():
            parameter.data = self.state[parameter]["old"]
        self.step()
        self.zero_grad()

    def _with_gradient(self):
        return [one for group in self.param_groups for one in group["params"] if one.grad is not None]


class SwapSWA(SGD):
    """Keeps an average of the weights, and exchanges the two through `.data`, as old code does."""

    @torch.no_grad()
    def update_average(self):
        for parameter in self._parameters():
            state = self.state[parameter]
            state["number"] = state.get("number", 0) + 1
            average = state.setdefault("average", torch.zeros_like(parameter))
            average.lerp_(parameter, 1 / state["number"])

    def swap(self):
        for parameter in self._parameters():
            average = self.state[parameter]["average"]
            kept = parameter.data.clone()
            parameter.data.copy_(average)
            average.copy_(kept)

    def _parameters(self):
        return [one for group in self.param_groups for one in group["params"]]


class ReplacingSGD(Optimizer):
    """Gives every parameter new memory in each step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad
