"""An optimizer whose shards are cut at random places: what a checkpoint sees of ZeRO, without its communication.

wrapped = ShardedByHand(torch.optim.AdamW(model.parameters()), ModelWrapper(model), seed=3)
wrapped.checkpoint_state()  # the real view of a sharded optimizer
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import torch
from torch import nn

from booster.comm import group_rank, group_size
from booster.core.shard_aware import follow_weights
from booster.interface import OptimizerWrapper, Shard, Shards
from booster.plugins.sharding.optimizer_state import ShardedOptimizerState, ShardedPendingGradients

__all__ = ["FixedScale", "ShardedByHand", "cut_at_random"]


def cut_at_random(numel: int, num_ranks: int, seed: str) -> list[tuple[int, tuple[int, int]]]:
    """Returns shards of a parameter, each with its rank: any number of them on any rank, in any order."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, numel), min(numel - 1, rng.randrange(2 * num_ranks + 1)))) if numel > 1 else []
    bounds = [0, *cuts, numel]
    shards = [(rng.randrange(num_ranks), span) for span in itertools.pairwise(bounds) if span[0] < span[1]]
    rng.shuffle(shards)
    return shards


class FixedScale:
    """A loss scale that stays."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, found_nonfinite: bool) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])


class ShardedByHand(OptimizerWrapper):
    """Puts shards of the parameters that train in the place of the parameters.

    Args:
        optim: Over the whole parameters.
        model: Boosted.
        seed: Of the cuts.
        has_masters: Shards of low-precision parameters are fp32 copies.
        group: The ranks that share the shards, of which every rank of the world is in one group.
        loss_scaler: Of the gradients.
    """

    follow_weights = staticmethod(follow_weights)

    def __init__(self, optim, model, *, seed, has_masters=False, group=None, loss_scaler=None) -> None:
        super().__init__(optim, model)
        self.loss_scaler = loss_scaler
        self._local: dict[str, torch.Tensor] = {}
        self._sums: dict[tuple[str, tuple[int, int]], torch.Tensor] = {}
        self._has_masters = has_masters
        self._seed = f"{seed} on {group_size(group)}"
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.logical_groups = [[(names[id(one)], one) for one in members["params"]] for members in optim.param_groups]
        parts: list[Shard] = []
        for index, members in enumerate(self.logical_groups):
            cut = [one for named in members if named[1].requires_grad for one in self._cut(*named, index, group)]
            frozen = [parameter for _, parameter in members if not parameter.requires_grad]
            optim.param_groups[index]["params"][:] = frozen + [shard.parameter for shard in cut]
            parts += cut
        trained = [(name, one) for members in self.logical_groups for name, one in members if one.requires_grad]
        for _, parameter in trained:
            optim.state.pop(parameter, None)
        self.shards = Shards(parts, [name for name, _ in trained], group)
        self.gradient_shards = self.shards.parts  # sums lie where the updates do

    @torch.no_grad()
    def _cut(self, name: str, parameter: nn.Parameter, index: int, group) -> list[Shard]:
        shards = cut_at_random(parameter.numel(), group_size(group), f"{self._seed} {name}")
        spans = [span for rank, span in shards if rank == group_rank(group)]
        has_master = self._has_masters and parameter.dtype in (torch.float16, torch.bfloat16)
        found = []
        for span in spans:
            memory = parameter.detach().view(-1)[slice(*span)]
            found.append(
                Shard(
                    name=name,
                    global_shape=tuple(parameter.shape),
                    span=span,
                    parameter=nn.Parameter(memory.float() if has_master else memory),
                    model_param=parameter,
                    group_index=index,
                    has_master=has_master,
                    is_primary=group_rank() < group_size(group),
                )
            )
        return found

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = self.shards.shard_of(parameter)
        return parameter if shard is None else shard.model_param

    def checkpoint_state(self) -> ShardedOptimizerState:
        return ShardedOptimizerState(self)

    # Gradients.

    def pending_gradients(self) -> ShardedPendingGradients:
        return ShardedPendingGradients(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._local, self._sums = {}, {}

    def local_gradients(self) -> dict[str, torch.Tensor]:
        return self._local

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        if allocate is not None:
            self._local = {}
            wanted = [shard for shard in self.shards.parts if shard.name in allocate]
            self._sums = {(one.name, one.span): torch.zeros(one.parameter.numel(), dtype=_sum(one)) for one in wanted}
        keys = {shard: (shard.name, shard.span) for shard in self.shards.parts}
        return [(shard, self._sums[key]) for shard, key in keys.items() if key in self._sums]

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        parameter = dict(self.model.named_parameters())[name]
        self._local[name] = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def set_sum(self, name: str, whole: torch.Tensor) -> None:
        """Makes this rank's parts of a whole tensor the sums of what was reduced."""
        assert tuple(whole.shape) == dict(self.model.named_parameters())[name].shape
        for shard in self.shards.parts:
            if shard.name == name:
                self._sums[name, shard.span] = whole.reshape(-1)[slice(*shard.span)].to(_sum(shard)).clone()


def _sum(shard: Shard) -> torch.dtype:
    dtype = shard.model_param.dtype
    return torch.float32 if dtype.itemsize < 4 else dtype
