"""An optimizer that multiplies, updates and rounds in one pass, in a few lines of torch."""

from __future__ import annotations

import torch


class FusedSGD(torch.optim.SGD):
    """Plain SGD that is a `booster.interface.FusedUpdate`; counts what it was asked for."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.num_fused, self.num_plain = 0, 0

    def step(self, closure=None):
        self.num_plain += 1
        return super().step(closure)

    @torch.no_grad()
    def fused_step(self, *, grad_scale=1.0, clip_coef=None, model_params=None, gradients=None, zero_grads=False):
        self.num_fused += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                raw = (gradients or {}).get(parameter, parameter.grad)
                if raw is None:
                    continue
                gradient = raw.float() * grad_scale
                if clip_coef is not None:
                    gradient *= clip_coef
                parameter.sub_(gradient, alpha=group["lr"])
                if parameter in (model_params or {}):
                    model_params[parameter].copy_(parameter.flatten().view_as(model_params[parameter]))
                if zero_grads:
                    raw.zero_()
