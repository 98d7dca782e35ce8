"""LAMB, written twice in one class: on whole parameters, and by the `ShardAware` protocol on parts of them.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, Algorithm 2 with bias
correction. A parameter's update is as long as the parameter is, so no part of it can be updated by itself.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.optim import Optimizer

from booster.interface import Shards


class ShardAwareLamb(Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.shards: Shards | None = None

    def use_shards(self, shards: Shards) -> None:
        self.shards = shards

    @torch.no_grad()
    def step(self, closure=None):
        updates = [
            (parameter, group["lr"], self._adam_update(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        squares = {
            parameter: torch.stack([parameter.square().sum(), update.square().sum()])
            for parameter, _, update in updates
        }
        if self.shards is not None:
            squares |= self._squares_of_whole_parameters(squares)
        for parameter, lr, update in updates:
            weight_norm, update_norm = squares[parameter].sqrt()
            is_usual = (weight_norm > 0) & (update_norm > 0)
            ratio = torch.where(is_usual, weight_norm / update_norm, torch.ones_like(weight_norm))
            parameter.sub_(lr * ratio * update)

    def _adam_update(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        (beta1, beta2), step = group["betas"], state["step"]
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
        return state["exp_avg"] / (1 - beta1**step) / denominator + group["weight_decay"] * parameter

    def _squares_of_whole_parameters(self, squares):
        """Called on every rank once a step, whatever it has."""
        by_name = defaultdict(int)
        of = {parameter: self.shards.shard_of(parameter) for parameter in squares}
        for parameter, shard in of.items():
            if shard is not None:
                by_name[shard.name] = by_name[shard.name] + squares[parameter]
        totals = self.shards.sum_over_ranks(by_name, lengths=2)
        return {parameter: totals[shard.name] for parameter, shard in of.items() if shard is not None}
