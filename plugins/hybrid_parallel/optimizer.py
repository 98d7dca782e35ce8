"""The hybrid plugin's optimizer: pipeline stages, and gradients of parameters tied across stages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_gather_bytes, all_reduce_max, all_reduce_sum, collective_device
from booster.core.accumulation import boosted_backward, check_scalar_loss
from booster.fault_tolerance.progress import in_phase
from booster.interface import LossScaler, TensorSlice
from booster.plugins.low_level_zero.config import ZeroSettings
from booster.plugins.low_level_zero.optimizer import ZeroOptimizer
from booster.plugins.sharding.optimizer import ShardedOptimizerState, ShardedPendingGradients

from .model import HybridModel
from .pipeline_parallel.stage_module import StageModel


class HybridOptimizer(ZeroOptimizer):
    """An optimizer over the parameters of a pipeline stage.

    Several stages may hold the same parameter, such as tied embeddings or a parameter of the root module. Each stage
    accumulates the gradient of its own use. At the end of an accumulation the gradients are all-reduced over these
    stages, so that all make the same step. Only the first of them counts the parameter in norms and saves it.

    Args:
        optim: The user's optimizer, with only the stage's parameters in its param groups.
        model: The boosted model.
        settings: ZeRO settings.
        stage_model: The stage's part of the model; optional, defaults to no pipeline.
        sharing_groups: Process groups by the stages that share parameters, for all sets with this stage.
        stage: Pipeline stage of this rank.
        stage_group: Group of the ranks of the pipeline.
        loss_scaler: Loss scaler of half precision; optional, defaults to no scaling.
        is_primary: If True, this rank writes what is equal on all ranks.
    """

    model: HybridModel

    def __init__(
        self,
        optim: Optimizer,
        model: HybridModel,
        settings: ZeroSettings,
        *,
        stage_model: StageModel | None = None,
        sharing_groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        stage: int = 0,
        stage_group: dist.ProcessGroup | None = None,
        loss_scaler: LossScaler | None = None,
        is_primary: bool = True,
    ) -> None:
        self.stage_model = stage_model
        self._sharing_groups = {} if sharing_groups is None else sharing_groups
        self.stage = stage
        self._stage_group = stage_group
        super().__init__(optim, model, settings, loss_scaler=loss_scaler, is_primary=is_primary)

    # Parameters of the unpartitioned model.

    def _record_group(self, index: int) -> None:
        if self.stage_model is None:
            super()._record_group(index)
            return
        if index < len(self.stage_model.groups):
            names = self.stage_model.groups[index]
        else:  # a new group, whose parameters may be on any stage: collective over the stages
            local_names = [self._names[id(one)] for one in self.param_groups[index]["params"]]
            encoded, _ = all_gather_bytes(json.dumps(local_names).encode(), self._stage_group)
            given = {name for encoded_names in encoded for name in json.loads(encoded_names)}
            names = [name for name in self.stage_model.parameters if name in given]
        self.logical_groups.append([(name, self.stage_model.parameters[name]) for name in names])

    def _sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self.stage_model is None:
            yield from super()._sharded_parameters()
            return
        # Frozen parameters of other stages are unknown here, and therefore included.
        for group in self.logical_groups:
            yield from group

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter of this stage."""
        return (self.stage,) if self.stage_model is None else self.stage_model.holders.get(name, (self.stage,))

    # Backward.

    @in_phase("backward")
    def backward(
        self,
        loss: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
        *,
        num_items: float | None = None,
    ) -> None:
        check_scalar_loss(loss)
        self.model.check_same_loss(loss)
        super().backward(loss, inputs, retain_graph, num_items=num_items)

    @contextmanager
    def accumulate_microbatches(self, num_items: float | None) -> Iterator[None]:
        """Count all microbatches' backwards in the block as one backward().

        Args:
            num_items: Number of items that the loss averages; see `Booster.backward`.

        Collective: yes.
        """
        self._begin_accumulation(num_items)
        previous, self._synchronizes = self._synchronizes, False
        try:
            with boosted_backward(), self._backward_context():
                yield
        finally:
            self._synchronizes = previous

    # Parameters of several stages.

    @torch.no_grad()
    def _reduce_gradients(self) -> float:
        """All-reduce the gradients of shared parameters that any stage used, then reduce over the data-parallel ranks.

        Collective: over the stages and the data-parallel ranks.
        """
        if self.stage_model is None:
            return super()._reduce_gradients()
        param_grads = {param_grad.name: param_grad for param_grad in self._reducer.param_grads}
        for stages, group in self._sharing_groups.items():
            shared = [
                param_grads[name]
                for name, holders in self.stage_model.holders.items()
                if holders == stages and name in self.stage_model.held and name in param_grads
            ]
            if not shared:
                continue
            own = [param_grad.local for param_grad in shared]
            used = torch.tensor([one is not None for one in own], dtype=torch.uint8, device=collective_device(group))
            for param_grad, gradient, is_used in zip(shared, own, all_reduce_max(used, group).tolist(), strict=True):
                if is_used:
                    total = torch.zeros_like(param_grad.parameter) if gradient is None else gradient.detach().clone()
                    self._reducer.set_local(param_grad, all_reduce_sum(total, group))
        return super()._reduce_gradients()

    # Checkpoints.

    def checkpoint_state(self) -> ShardedOptimizerState:
        return _StageOptimizerState(self) if self.stage_model is not None else super().checkpoint_state()

    def pending_gradients(self) -> ShardedPendingGradients:
        return _StageAccumulatedGradients(self) if self.stage_model is not None else super().pending_gradients()


class _StageOptimizerState(ShardedOptimizerState):
    def __init__(self, optimizer: HybridOptimizer) -> None:
        super().__init__(optimizer)
        # Frozen parameters are among the names with shards, although they are unsharded.
        unsharded = {id(one) for group in optimizer.param_groups for one in group["params"]}
        frozen = {name for group in optimizer.logical_groups for name, one in group if id(one) in unsharded}
        self._shards = {name: shards for name, shards in self._shards.items() if name not in frozen}


class _StageAccumulatedGradients(ShardedPendingGradients):
    optimizer: HybridOptimizer

    def parameters(self) -> dict[str, nn.Parameter]:
        stage_model = self.optimizer.stage_model
        assert stage_model is not None
        return {name: one for name, one in super().parameters().items() if name in stage_model.held}

    def logical_parameters(self) -> dict[str, nn.Parameter]:
        return super().parameters()

    def summand_index(self, name: str) -> int:
        return self.optimizer.stages_of(name).index(self.optimizer.stage)

    def num_summands(self, name: str) -> int:
        return len(self.optimizer.stages_of(name))

    def slices(self) -> list[TensorSlice]:
        # A stage saves its own contribution to a gradient even if another stage saves the parameter.
        stage_model = self.optimizer.stage_model
        assert stage_model is not None
        own = self.tensors().items()
        return [
            tensor_slice
            for name, one in own
            for tensor_slice in stage_model.layouts[name].slices(name, one.contiguous())
        ]
