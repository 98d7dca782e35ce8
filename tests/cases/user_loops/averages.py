"""Loops around the weights: averages of them, perturbations, optimizers with a mode of their own."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from .one_process import Outcome, adamw, evaluate, fit, gathered, noise, part, seeded, sgd, update

BATCH, WIDTH = 8, 6


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def make_normalized() -> nn.Module:
    """The layers behind the batch norm are a pair that tensor parallelism divides."""
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(WIDTH, 16), norm, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def squares(outputs, inputs):
    return (outputs - inputs.sum(dim=1, keepdim=True)).square().mean()


class EMA:
    """A moving average of weights with `store` and `restore`, as the package torch_ema has it."""

    def __init__(self, parameters, decay):
        self.decay = decay
        self.shadow = [one.detach().clone() for one in parameters]

    @torch.no_grad()
    def update(self, parameters):
        for shadow, one in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - self.decay) * (shadow - one))

    def store(self, parameters):
        self.stored = [one.detach().clone() for one in parameters]

    def copy_to(self, parameters):
        for shadow, one in zip(self.shadow, parameters, strict=True):
            one.data.copy_(shadow.data)

    def restore(self, parameters):
        for stored, one in zip(self.stored, parameters, strict=True):
            one.data.copy_(stored.data)


def ema_by_hand(booster):
    """Evaluates with the averaged weights, trains on with its own, and ends with the averaged ones."""
    model = seeded(make_model)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    with gathered(model):
        ema = EMA(model.parameters(), 0.5)
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        with gathered(model):
            ema.update(model.parameters())
        if step % 2:
            with gathered(model):
                ema.store(model.parameters())
                ema.copy_to(model.parameters())
            losses.append(evaluate(booster, model, part(booster, noise(50, BATCH, WIDTH)), squares))
            with gathered(model):
                ema.restore(model.parameters())
    with gathered(model):
        ema.copy_to(model.parameters())
    return Outcome(losses, {"model": model})


def ema_without_gathered(booster):
    """As written for DDP: the parameters of the model are read where they are."""
    model = seeded(make_model)
    average = copy.deepcopy(model).to(booster.device)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
    return Outcome(losses, {"model": model}, {"averaged outputs": average(noise(9, BATCH, WIDTH)).detach()})


def ema_of_state_dicts(booster):
    """timm's: the average follows `state_dict()`, buffers included."""
    model = seeded(make_normalized)
    average = copy.deepcopy(model).to(booster.device).eval()
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        state = model.state_dict()
        with torch.no_grad():
            for name, slow in average.state_dict().items():
                slow.copy_(0.5 * slow + 0.5 * state[name])
    return Outcome(losses, {"model": model}, {"averaged outputs": average(noise(9, BATCH, WIDTH)).detach()})


def ema_by_torch(booster):
    """`AveragedModel` of the boosted model, with its buffers."""
    model = seeded(make_normalized)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    with gathered(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        with gathered(model):
            average.update_parameters(model)
    average.eval()
    return Outcome(losses, {"model": model}, {"averaged outputs": average(noise(9, BATCH, WIDTH)).detach()})


def swa(booster):
    """Averages the weights of the last steps with `SWALR`, and computes the statistics of the average's batch norms."""
    model = seeded(make_normalized)
    optimizer = sgd(model.parameters())
    model, optimizer, *_ = booster.boost(model, optimizer)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    with gathered(model):
        average = AveragedModel(booster.unwrap_model(model))
    losses = []
    for step in range(5):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        if step >= 2:
            with gathered(model):
                average.update_parameters(booster.unwrap_model(model))
            scheduler.step()
    update_bn([part(booster, noise(step, BATCH, WIDTH)) for step in range(5)], average)
    average.eval()
    return Outcome(losses, {"model": model}, {"averaged outputs": average(noise(9, BATCH, WIDTH)).detach()})


def schedule_free(booster):
    """The package schedulefree: trains at one point, evaluates at another."""
    from schedulefree import AdamWScheduleFree

    model = seeded(make_model)
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.02, eps=1e-3, warmup_steps=2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for epoch in range(2):
        optimizer.train()
        for step in range(3 * epoch, 3 * epoch + 3):
            losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
            update(optimizer)
        optimizer.eval()
        losses.append(evaluate(booster, model, part(booster, noise(50, BATCH, WIDTH)), squares))
    return Outcome(losses, {"model": model})


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its best known implementation has it, github.com/davda54/sam."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            self.base_optimizer.step()
            return
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()

    def _grad_norm(self):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(grads), p=2)


def sam_optimizer(booster):
    """An optimizer whose two steps need the norm of all gradients."""
    model = seeded(make_model)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(4):
        batch = part(booster, noise(step, BATCH, WIDTH))
        losses.append(fit(booster, model, optimizer, batch, squares))
        optimizer.first_step(zero_grad=True)
        losses.append(fit(booster, model, optimizer, batch, squares))
        optimizer.second_step(zero_grad=True)
    return Outcome(losses, {"model": model})


class SAMByGivenNorm(torch.optim.SGD):
    """Sharpness-aware minimization of every element by itself: the loop gives the norm of all gradients."""

    @torch.no_grad()
    def first_step(self, norm, rho=0.05):
        for p in self._parameters():
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad, alpha=rho / float(norm))

    @torch.no_grad()
    def second_step(self):
        for p in self._parameters():
            p.copy_(self.state[p]["old_p"])
        self.step()

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


def sam_by_given_norm(booster):
    """What to write under plugins that divide the gradients."""
    model = seeded(make_model)
    model, optimizer, *_ = booster.boost(model, SAMByGivenNorm(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(4):
        batch = part(booster, noise(step, BATCH, WIDTH))
        losses.append(fit(booster, model, optimizer, batch, squares))
        optimizer.first_step(booster.clip_grad_norm_(optimizer, float("inf")))
        optimizer.zero_grad()
        losses.append(fit(booster, model, optimizer, batch, squares))
        optimizer.second_step()
        optimizer.zero_grad()
    return Outcome(losses, {"model": model})


def sam_by_the_loop(booster):
    """The loop moves the weights along `p.grad`, and back."""
    model = seeded(make_model)
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    losses = []
    for step in range(4):
        batch = part(booster, noise(step, BATCH, WIDTH))
        losses.append(fit(booster, model, optimizer, batch, squares))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        losses.append(fit(booster, model, optimizer, batch, squares))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        update(optimizer)
    return Outcome(losses, {"model": model})
