"""Optimizers as third parties write them: elementwise ones, others, and some that are hard to try out."""

from __future__ import annotations

from collections import deque

import torch
from torch.optim import AdamW, Optimizer


class Simple(Optimizer):
    """Updates one parameter at a time by `update`, which returns what is subtracted."""

    def __init__(self, params, lr=1e-2, **hyperparameters):
        super().__init__(params, {"lr": lr, **hyperparameters})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.update(parameter, parameter.grad, group))

    def update(self, parameter, gradient, group):
        return gradient


# Elementwise.


class Lion(Optimizer):
    """Chen et al. 2023, Algorithm 2. Its constructor has other names, in another order."""

    def __init__(self, model_parameters, *, decay, betas=(0.9, 0.99), rate=1e-3):
        super().__init__(model_parameters, {"rate": rate, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                direction = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["rate"] * group["decay"]).sub_(group["rate"] * direction)
                average.lerp_(parameter.grad, 1 - beta2)


class CautiousAdamW(AdamW):
    """A subclass of torch's with a step of its own: keeps only what points along the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [[parameter.clone() for parameter in group["params"]] for group in self.param_groups]
        super().step(closure)
        for group, olds in zip(self.param_groups, before, strict=True):
            for parameter, old in zip(group["params"], olds, strict=True):
                parameter.copy_(torch.where((old - parameter) * parameter.grad > 0, parameter, old))


class GlobalCount(Simple):
    """Counts its steps in an attribute of its own, one of the class, one in the state and one in the group."""

    num_steps_of_all = 0
    log: list = []

    def __init__(self, params):
        super().__init__(params, num_steps=0)
        self.num_steps = 0
        self.state["global"] = {"num_steps": 0}

    def step(self, closure=None):
        self.num_steps += 1
        GlobalCount.num_steps_of_all += 1
        self.log.append(self.num_steps)
        self.state["global"]["num_steps"] += 1
        for group in self.param_groups:
            group["num_steps"] += 1
        super().step(closure)

    def update(self, parameter, gradient, group):
        return gradient / (self.num_steps + self.state["global"]["num_steps"] + group["num_steps"])


class StateFromTheStart(Simple):
    """Makes its states in the constructor, and fails without."""

    def __init__(self, params, lr=1e-2, initial=0.5):
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": torch.full_like(parameter, initial), "step": torch.tensor(0.0)}

    def update(self, parameter, gradient, group):
        state = self.state[parameter]
        state["step"] += 1
        return gradient / state["sum"].addcmul_(gradient, gradient).sqrt()


class PastGradients(Simple):
    """Keeps its state in containers: the mean of the last three gradients."""

    def update(self, parameter, gradient, group):
        past = self.state[parameter].setdefault("past", deque(maxlen=3))
        past.append(gradient.clone())
        return torch.stack(list(past)).mean(0)


class TensorAsState(Simple):
    """Its state is not a dict."""

    def update(self, parameter, gradient, group):
        before = self.state.get(parameter)
        self.state[parameter] = gradient.clone() if before is None else before.lerp(gradient, 0.5)
        return self.state[parameter]


class Lookahead(Optimizer):
    """Zhang et al. 2019, around any optimizer, whose groups and state it shares."""

    def __init__(self, inner, every=2):
        self.inner, self.every, self.num_steps = inner, every, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                if self.num_steps % self.every == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))


# Not elementwise.


class TrustRatio(Simple):
    def update(self, parameter, gradient, group):
        return gradient * parameter.norm() / gradient.norm()


class RowFactored(Simple):
    def update(self, parameter, gradient, group):
        if gradient.dim() < 2:
            return gradient.sign()
        rows = self.state[parameter].setdefault("rows", torch.zeros(gradient.shape[0]))
        rows.lerp_(gradient.square().flatten(1).mean(1), 0.1)
        return gradient / rows.sqrt().view(-1, *[1] * (gradient.dim() - 1))


class FactorsLargeMatricesOnly(RowFactored):
    def update(self, parameter, gradient, group):
        if gradient.dim() == 2 and min(gradient.shape) >= 128:
            return super().update(parameter, gradient, group)
        return gradient


class ClipsGlobally(Simple):
    """The norm of all gradients of this process, which on shards are not all."""

    def step(self, closure=None):
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(everything, self.defaults["max_norm"])
        super().step(closure)


class CentralizesConvolutions(Simple):
    def update(self, parameter, gradient, group):
        if gradient.dim() > 2:
            return gradient - gradient.mean(dim=(1, 2, 3), keepdim=True)
        return gradient


class DecaysMatricesOnly(Simple):
    def update(self, parameter, gradient, group):
        return gradient + 0.1 * parameter if gradient.dim() > 1 else gradient


class QuantizesBlocks(Simple):
    """Momentum in 8 bits, with one scale for 256 elements, where whole blocks fit."""

    def update(self, parameter, gradient, group):
        if parameter.numel() % 256:
            return gradient
        scale = gradient.reshape(-1, 256).abs().amax(1, keepdim=True) / 127
        return ((gradient.reshape(-1, 256) / scale).round() * scale).view_as(gradient)


class FirstIsSpecial(Optimizer):
    """Treats the first parameter of a group in another way."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.sub_(group["lr"] * parameter.grad * (10 if index == 0 else 1))


class CountsParameters(Simple):
    """A number in the group that depends on what the rank has; it acts from the hundredth step on."""

    def update(self, parameter, gradient, group):
        group["num_seen"] = group.get("num_seen", 0) + 1
        return gradient * (0.1 if group["num_seen"] > 1000 else 1)


class SwitchesLater(Simple):
    """Collects a norm in the state for a time when it will be used."""

    def update(self, parameter, gradient, group):
        state = self.state[parameter]
        state["norm"] = max(state.get("norm", 0.0), float(gradient.norm()))
        return gradient


class Shampoo(Simple):
    """Two square matrices per parameter, or for a flat part one of its length squared, which would be 5 GB."""

    def update(self, parameter, gradient, group):
        for dim, size in enumerate(gradient.shape):
            matrix = self.state[parameter].setdefault(f"factor{dim}", torch.eye(size))
            flat = gradient.movedim(dim, 0).reshape(size, -1)
            matrix.add_(flat @ flat.T)
        return gradient


class KeepsItsOwnList(Optimizer):
    """Steps a list of parameters of its own, into which shards never come."""

    def __init__(self, params, lr=1e-2):
        self.mine = list(params)
        super().__init__(self.mine, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


class Noisy(Simple):
    def update(self, parameter, gradient, group):
        return gradient + torch.randn_like(gradient)


# Those that can't be tried out.


class NeedsClosure(Simple):
    def step(self, closure):
        closure()
        super().step()


class Raises(Simple):
    def update(self, parameter, gradient, group):
        raise RuntimeError("the model is not compiled")


class RaisesOnLongVectors(Simple):
    def update(self, parameter, gradient, group):
        if gradient.dim() == 1 and gradient.numel() > 1000:
            raise ValueError("long vectors belong to another optimizer")
        return gradient


class FreesMemory(Simple):
    """Holds something outside of Python that its end frees, as DeepSpeed's CPU Adam does."""

    freed: list = []

    def __del__(self):
        self.freed.append(True)


class HoldsTensor(Simple):
    def __init__(self, params, numel):
        super().__init__(params)
        self.buffer = torch.zeros(numel)

    def update(self, parameter, gradient, group):
        self.buffer += 1
        return gradient


class HoldsGenerator(Simple):
    def __init__(self, params):
        super().__init__(params)
        self.stream = (number for number in range(10))


class NeverMoves(Simple):
    def update(self, parameter, gradient, group):
        return torch.zeros_like(gradient)


class Explodes(Simple):
    def update(self, parameter, gradient, group):
        return gradient / 0


class StepsTwice(torch.optim.SGD):
    """SAM with a `step` of its own: only its first step depends on the norm of all gradients."""

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            self.state[one]["old"] = one.clone()
            one.add_(one.grad / norm)

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for one in group["params"]:
                one.copy_(self.state[one]["old"])
        self.step()
