"""Part of the model that a pipeline stage's optimizer updates, and gradients of parameters tied across stages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_gather_bytes, all_reduce_sum, any_rank
from booster.interface import TensorSlice
from booster.plugins.low_level_zero.optimizer import ModelPart, NamedParameters, ZeroOptimizer, ZeroPendingGradients
from booster.plugins.low_level_zero.reducer import GradientReducer
from booster.plugins.sharding.optimizer import ShardedOptimizer
from booster.plugins.sharding.optimizer_state import ShardedOptimizerState

from .pipeline_parallel.stage_module import StageModel


class StagePart(ModelPart):
    """Parameters of a pipeline stage.

    Several stages may hold the same parameter, such as tied embeddings or a parameter of the root module. Each stage
    accumulates the gradient of its own use. At the end of an accumulation the gradients are all-reduced over these
    stages, so that all make the same step. Only the first of them counts the parameter in norms and saves it.

    Args:
        stage_model: The stage's part of the model.
        stage: Pipeline stage of this rank.
        stage_group: Group of the ranks of the pipeline.
        tied_groups: Process groups by the stages that share parameters, for all sets with this stage.
    """

    def __init__(
        self,
        stage_model: StageModel,
        *,
        stage: int,
        stage_group: dist.ProcessGroup | None,
        tied_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        self.model = stage_model
        self.stage = stage
        self._stage_group = stage_group
        self._tied_groups = tied_groups

    def logical_group(self, index: int, local: NamedParameters) -> NamedParameters:
        if index < len(self.model.groups):
            names = self.model.groups[index]
        else:  # a new group, whose parameters may be on any stage
            encoded, _ = all_gather_bytes(json.dumps([name for name, _ in local]).encode(), self._stage_group)
            given = {name for encoded_names in encoded for name in json.loads(encoded_names)}
            names = [name for name in self.model.parameters if name in given]
        return [(name, self.model.parameters[name]) for name in names]

    def sharded_parameters(
        self, local: Iterable[tuple[str, nn.Parameter]], groups: Iterable[NamedParameters]
    ) -> NamedParameters:
        # Frozen parameters of other stages are unknown here, and therefore included.
        return [member for group in groups for member in group]

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter of this stage."""
        return self.model.holders.get(name, (self.stage,))

    def tied_names(self) -> Collection[str]:
        return [name for name, stages in self.model.holders.items() if len(stages) > 1]

    @torch.no_grad()
    def reduce_tied_gradients(self, reducer: GradientReducer) -> None:
        param_grads = {param_grad.name: param_grad for param_grad in reducer.param_grads}
        for stages, group in self._tied_groups.items():
            tied = [
                param_grads[name]
                for name, holders in self.model.holders.items()
                if holders == stages and name in self.model.held and name in param_grads
            ]
            if not tied:
                continue
            own = [param_grad.local for param_grad in tied]
            used = any_rank([one is not None for one in own], group)
            for param_grad, gradient, is_used in zip(tied, own, used, strict=True):
                if is_used:
                    total = torch.zeros_like(param_grad.parameter) if gradient is None else gradient.detach().clone()
                    reducer.set_local(param_grad, all_reduce_sum(total, group))

    def checkpoint_state(self, optimizer: ZeroOptimizer) -> ShardedOptimizerState:
        return _StageOptimizerState(optimizer)

    def pending_gradients(self, optimizer: ZeroOptimizer) -> ZeroPendingGradients:
        return _StageAccumulatedGradients(optimizer, self)


class _StageOptimizerState(ShardedOptimizerState):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer)
        # Frozen parameters are among the names with shards, although they are unsharded.
        unsharded = {id(one) for group in optimizer.param_groups for one in group["params"]}
        frozen = {name for group in optimizer.logical_groups for name, one in group if id(one) in unsharded}
        self._shards = {name: shards for name, shards in self._shards.items() if name not in frozen}


class _StageAccumulatedGradients(ZeroPendingGradients):
    def __init__(self, optimizer: ShardedOptimizer, part: StagePart) -> None:
        super().__init__(optimizer)
        self._part = part

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in super().parameters().items() if name in self._part.model.held}

    def logical_parameters(self) -> dict[str, nn.Parameter]:
        return super().parameters()

    def summand_index(self, name: str) -> int:
        return self._part.stages_of(name).index(self._part.stage)

    def num_summands(self, name: str) -> int:
        return len(self._part.stages_of(name))

    def slices(self) -> list[TensorSlice]:
        # A stage saves its own contribution to a gradient even if another stage saves the parameter.
        own, layouts = self.tensors().items(), self._part.model.layouts
        return [tensor_slice for name, one in own for tensor_slice in layouts[name].slices(name, one.contiguous())]
