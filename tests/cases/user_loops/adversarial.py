"""Loops with several models: adversaries, penalties of gradients, target networks, optimizers side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .one_process import Outcome, adamw, gathered, noise, part, seeded, sgd, update

BATCH, LATENT, WIDTH = 8, 4, 6


def make_generator() -> nn.Module:
    first = nn.Linear(LATENT, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2)
    return nn.Sequential(*first, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH), nn.Tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make_judge() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


class Judge(nn.Module):
    """Its blocks are parameter groups of their own under FSDP, whose weights are freed after their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


def adversaries(booster, make_judge=make_judge):
    generator, judge = seeded(make_generator), seeded(make_judge, 1)
    generator, g_optimizer, *_ = booster.boost(generator, adamw(generator.parameters()))
    judge, d_optimizer, *_ = booster.boost(judge, adamw(judge.parameters()))
    return generator, g_optimizer, judge, d_optimizer


def gan(booster):
    """The gradients of the judge from the generator's backward are dropped."""
    generator, g_optimizer, judge, d_optimizer = adversaries(booster)
    losses = []
    for step in range(4):
        real, latent = part(booster, noise(step, BATCH, WIDTH)), part(booster, noise(100 + step, BATCH, LATENT))
        fake = generator(latent)
        d_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        booster.backward(d_loss, d_optimizer)
        update(d_optimizer)
        g_loss = F.softplus(-judge(fake)).mean()
        booster.backward(g_loss, g_optimizer)
        update(g_optimizer)
        d_optimizer.zero_grad()
        losses += [float(d_loss.detach()), float(g_loss.detach())]
    return Outcome(losses, {"generator": generator, "judge": judge})


def gan_with_a_frozen_judge(booster):
    """The judge does not require gradients while the generator learns, and fakes are made anew for it."""
    generator, g_optimizer, judge, d_optimizer = adversaries(booster)
    losses = []
    for step in range(4):
        real, latent = part(booster, noise(step, BATCH, WIDTH)), part(booster, noise(100 + step, BATCH, LATENT))
        with torch.no_grad():
            fake = generator(latent)
        judge.requires_grad_(True)
        d_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
        booster.backward(d_loss, d_optimizer)
        update(d_optimizer)
        judge.requires_grad_(False)
        g_loss = F.softplus(-judge(generator(latent))).mean()
        booster.backward(g_loss, g_optimizer)
        update(g_optimizer)
        losses += [float(d_loss.detach()), float(g_loss.detach())]
    return Outcome(losses, {"generator": generator, "judge": judge})


def wgan_gp(booster):
    """Gulrajani et al., 2017: two steps of the critic with a penalty of its gradient, one of the generator."""
    generator, g_optimizer, critic, c_optimizer = adversaries(booster, Judge)
    losses = []
    for step in range(4):
        real, latent = part(booster, noise(step, BATCH, WIDTH)), part(booster, noise(100 + step, BATCH, LATENT))
        mix = part(booster, noise(200 + step, BATCH, 1)).sigmoid()
        fake = generator(latent).detach()
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        booster.backward(loss, c_optimizer)
        update(c_optimizer)
        losses.append(float(loss.detach()))
        if step % 2:
            loss = -critic(generator(latent)).mean()
            booster.backward(loss, g_optimizer)
            update(g_optimizer)
            c_optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return Outcome(losses, {"generator": generator, "critic": critic})


def wgan_gp_by_parts(booster):
    """The critic's losses and the penalty have backwards of their own, the penalty's last."""
    critic = seeded(Judge)
    critic, optimizer, *_ = booster.boost(critic, adamw(critic.parameters()))
    losses = []
    for step in range(4):
        real, fake = (part(booster, noise(number + step, BATCH, WIDTH)) for number in (0, 100))
        real_score, fake_score = critic(real).mean(), critic(fake).mean()
        between = (0.5 * real + 0.5 * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        for loss in (-real_score, fake_score, penalty):
            booster.backward(loss, optimizer)
            losses.append(float(loss.detach()))
        update(optimizer)
    return Outcome(losses, {"critic": critic})


def gan_with_both_losses_first(booster):
    """The judge is frozen for the generator's loss, after its own was computed; both backwards follow."""
    generator, g_optimizer, judge, d_optimizer = adversaries(booster)
    losses = []
    for step in range(4):
        real, latent = part(booster, noise(step, BATCH, WIDTH)), part(booster, noise(100 + step, BATCH, LATENT))
        fake = generator(latent)
        d_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        booster.unwrap_model(judge).requires_grad_(False)
        g_loss = F.softplus(-judge(fake)).mean()
        booster.unwrap_model(judge).requires_grad_(True)
        booster.backward(d_loss, d_optimizer)
        booster.backward(g_loss, g_optimizer)
        update(d_optimizer, g_optimizer)
        losses += [float(d_loss.detach()), float(g_loss.detach())]
    return Outcome(losses, {"generator": generator, "judge": judge})


def gradient_penalty(booster):
    """R1: the squared gradient of the outputs with respect to the inputs."""
    model = seeded(Judge)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH)).requires_grad_(True)
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = F.softplus(-outputs).mean() + slope.square().sum(dim=1).mean()
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def encoder_and_decoder(booster):
    """Two models with optimizers of their own learn from one loss, whose backward runs once."""
    encoder, decoder = seeded(make_judge), seeded(lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 6)), 1)
    encoder, e_optimizer, *_ = booster.boost(encoder, adamw(encoder.parameters()))
    decoder, d_optimizer, *_ = booster.boost(decoder, sgd(decoder.parameters()))
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        loss = (decoder(encoder(inputs)) - inputs).square().mean()
        booster.backward(loss, e_optimizer)
        update(e_optimizer, d_optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"encoder": encoder, "decoder": decoder})


class Ensemble(nn.Module):
    """Several models in one, of which one may be run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.actor(x).log_softmax(-1), self.critic(x)


def actor_and_critic(booster):
    """Submodules of one model, each with its group of one optimizer; the advantage is computed without gradients."""
    model = seeded(Ensemble)
    groups = [{"params": model.actor.parameters(), "lr": 0.02}, {"params": model.critic.parameters(), "lr": 0.05}]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups, eps=1e-3))
    losses = []
    for step in range(4):
        states, rewards = part(booster, noise(step, BATCH, WIDTH)), part(booster, noise(100 + step, BATCH))
        with torch.no_grad():
            advantage = rewards - model(states)[1].squeeze(1)
        for _ in range(2):
            chances, worth = model(states)
            loss = -(chances[:, 0] * advantage).mean() + (worth.squeeze(1) - rewards).square().mean()
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, 0.5)
            update(optimizer)
            losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def optimizers_of_parts(booster):
    """One model whose parts have optimizers of their own, as Lightning's users have them."""
    model = seeded(Ensemble)
    optimizers = [adamw(model.actor.parameters()), sgd(model.critic.parameters())]
    model, optimizers, *_ = booster.boost(model, optimizers)
    losses = []
    for step in range(4):
        chances, worth = model(part(booster, noise(step, BATCH, WIDTH)))
        loss = worth.square().mean() - chances[:, 0].mean()
        booster.backward(loss, optimizers[0])
        update(*optimizers)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def target_network(booster):
    """DQN: a frozen target network gets the weights of the trained one by `load_state_dict` now and then."""
    online, target = seeded(make_judge), seeded(make_judge).requires_grad_(False)
    online, optimizer, *_ = booster.boost(online, sgd(online.parameters()))
    target, *_ = booster.boost(target)
    losses = []
    for step in range(5):
        states = part(booster, noise(step, BATCH, WIDTH))
        with torch.no_grad():
            wanted = 1 + 0.9 * target(-states)
        loss = F.smooth_l1_loss(online(states), wanted)
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
        if step % 2:
            target.load_state_dict(online.state_dict())
    return Outcome(losses, {"online": online, "target": target})


def momentum_teacher(booster):
    """BYOL: the teacher's weights are the moving average of the student's, parameter by parameter."""
    student, teacher = seeded(make_judge), seeded(make_judge).requires_grad_(False)
    student, optimizer, *_ = booster.boost(student, sgd(student.parameters()))
    teacher, *_ = booster.boost(teacher)
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        with torch.no_grad():
            wanted = teacher(inputs + 1)
        loss = (student(inputs) - wanted).square().mean()
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
        with torch.no_grad(), gathered(student), gathered(teacher):
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return Outcome(losses, {"student": student, "teacher": teacher})
