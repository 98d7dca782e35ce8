"""Loops that read weights where their module does not run: in a penalty, a distance, a product or an average."""

from __future__ import annotations

import torch
from gemini_models import WIDTH, square_loss


def penalty(model):
    """Returns a penalty of all weights."""
    return 0.1 * sum(parameter.norm() for parameter in model.parameters())


def after_the_forward(model, x, backward, rank, step):
    backward(square_loss(model(x)) + penalty(model))


def before_the_forward(model, x, backward, rank, step):
    added = penalty(model)
    backward(square_loss(model(x)) + added)


def with_a_factor_of_the_rank(model, x, backward, rank, step):
    backward((square_loss(model(x)) + penalty(model)) * (rank + 1))


def in_a_backward_of_its_own(model, x, backward, rank, step):
    backward(penalty(model))
    backward(square_loss(model(x)))


def as_views(model, x, backward, rank, step):
    flat = torch.cat([parameter.view(-1) for parameter in model.parameters()])
    backward(square_loss(model(x)) + 0.1 * flat.norm())


def distance(model, x, backward, rank, step):
    anchors = [torch.full_like(parameter.detach(), 0.5) for parameter in model.parameters()]
    others = [torch.ones(parameter.shape, device=x.device) for parameter in model.parameters()]
    distances = (
        (one - anchor).square().sum() + (one * other).abs().sum()
        for one, anchor, other in zip(model.parameters(), anchors, others, strict=True)
    )
    backward(square_loss(model(x)) + 0.01 * sum(distances))


def in_a_product(model, x, backward, rank, step):
    backward(square_loss(model(x)) + (x @ model.blocks[1].first.weight.t()).square().mean())


def without_gradient(model, x, backward, rank, step):
    with torch.no_grad():
        average = [torch.zeros(parameter.shape, device=x.device) for parameter in model.parameters()]
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.mul_(0.5).add_(parameter, alpha=0.5)
        torch._foreach_lerp_(average, list(model.parameters()), 0.5)
        weight = model.blocks[0].first.weight
        average.append(weight @ weight.t() - torch.eye(WIDTH, device=x.device))
    backward(square_loss(model(x)))
    return average


def of_frozen_weights(model, x, backward, rank, step):
    model.blocks[0].requires_grad_(step % 2 == 0)
    backward(square_loss(model(x)) + penalty(model))


LOOPS = {
    loop.__name__: loop
    for loop in (
        after_the_forward,
        before_the_forward,
        with_a_factor_of_the_rank,
        in_a_backward_of_its_own,
        as_views,
        distance,
        in_a_product,
        without_gradient,
        of_frozen_weights,
    )
}
