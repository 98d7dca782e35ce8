"""Plugin of data parallelism with replicated models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, broadcast, group_size, new_cpu_group, new_mesh, timeout_scope
from booster.compatibility import takes_foreign
from booster.core.accumulation import AccumulationState
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.lazy_init import check_materialized, move_to_device
from booster.mixed_precision import mixed_precision_names
from booster.plugins.base import (
    DistributedPlugin,
    WrappedPair,
    arguments_of,
    check_gradients_add_up,
    check_weights_stay_equal,
)
from booster.plugins.step_settings import Hyperparameters
from booster.plugins.sync_batch_norm import convert_batch_norm
from booster.pytree import map_tensors

from .config import DDPConfig
from .reducer import CommHook, Reducer

# Reducers of the user's models, which may outlive their wrappers. As attributes they would be copied and pickled.
_reducers: WeakKeyDictionary[nn.Module, Reducer] = WeakKeyDictionary()


class TorchDDPPlugin(DistributedPlugin):
    """Data parallelism: every rank holds the full model and optimizer; gradients are averaged while backward runs.

    Memory per rank: full parameters, gradients and optimizer states, and the buffers of two buckets. Bytes sent per
    rank and step: 2(P-1)/P of the gradients. The arguments are those of torch's `DistributedDataParallel`. Parameter
    hooks reduce the gradients, see Note [Gradient reduction]: every backward outside of `no_sync` leaves their mean in
    `.grad`. This includes plain `loss.backward()` calls and losses computed by any method of the model. Li et al.,
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Collective: every rank must create it, with equal arguments.

    Args:
        broadcast_buffers: If True, broadcast the first rank's buffers after each backward that averages gradients. If
            False, each rank keeps its own; a checkpoint has the first rank's, with which all ranks resume.
        bucket_cap_mb: Bucket size in MiB.
        find_unused_parameters: Unused parameters are always found. On an accelerator with synchronized batch
            normalization, True delays the reduction to the end of backward, because ranks that use different parameters
            would otherwise issue collectives in different orders.
        check_reduction: No effect, as in torch; kept for compatibility.
        gradient_as_bucket_view: If True, gradients are views of the buckets, which saves copies and buffers.
        static_graph: If True, all steps use the same parameters, and ranks exchange them in the first step only.
        sync_batch_norm: If True, batch normalization uses the statistics of all ranks' batches, as one process would.

    Raises:
        ConfigError: `launch` was not called, or an argument is invalid; raised on all ranks.
        DesyncError: The ranks' arguments differ.
    """

    @timeout_scope("setup")
    @takes_foreign("fp8_communication", call="making a {}")
    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        sync_batch_norm: bool = True,
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._config = arguments_of(DDPConfig, given)
        self._verify_arguments(lambda: self._config.check(group_size()))
        self._mesh = new_mesh(self._device.type, (group_size(),), ("dp",))
        self._control_group = None if self._device.type == "cpu" else new_cpu_group()

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self._control_group]

    def supported_precisions(self) -> list[str]:
        return ["fp32", *mixed_precision_names()]

    def control_precision(self) -> bool:
        return False

    def config_fingerprint(self) -> list[str]:
        return self._config.fingerprint

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        check_materialized(model)
        check_weights_stay_equal(model, self.dp_size)
        check_gradients_add_up(model, self.dp_size)

    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: None = None) -> None:
        move_to_device(model, optimizer, self._device)
        broadcast([*model.parameters(), *model.buffers()])
        if self._config.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: None) -> WrappedPair:
        boosted = DDPModel(model, is_primary=self.dp_rank == 0)
        boosted.broadcasts_buffers = self._config.broadcast_buffers
        if self.dp_size > 1:
            _reducers[model] = self._new_reducer(model, has_optimizer=optimizer is not None)
        wrapped = None if optimizer is None else DDPOptimizer(optimizer, boosted)
        return boosted, wrapped

    def _new_reducer(self, model: nn.Module, *, has_optimizer: bool) -> Reducer:
        has_collectives = self._config.sync_batch_norm and any(isinstance(one, _BatchNorm) for one in model.modules())
        is_order_fixed = self._device.type != "cpu" and not self._config.find_unused_parameters
        return Reducer(
            model,
            self._config,
            control_group=self._control_group,
            overlaps=is_order_fixed or not has_collectives,
            has_optimizer=has_optimizer,
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        if model is None and optimizer is None:
            raise ConfigError("no_sync() was called without a model: write booster.no_sync(model, optimizer)")
        wrapper = model if model is not None or optimizer is None else optimizer.model
        reducer = wrapper.reducer if isinstance(wrapper, DDPModel) else None
        return nullcontext() if reducer is None else reducer.no_sync()

    def leave_reduction(self, model: ModelWrapper, axis: str, handler: str) -> None:
        if axis != "dp" or not isinstance(model, DDPModel):
            super().leave_reduction(model, axis, handler)
        elif model.reducer is not None:
            model.reducer.leave_gradients_local(handler)


class DDPModel(ModelWrapper):
    """Boosted model: the user's model with hooks on its parameters."""

    @property
    def reducer(self) -> Reducer | None:
        """Reducer of the gradients; None with one rank."""
        return _reducers.get(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward with the arguments moved to the model's device. No communication."""
        if self._compute_device_type != "cpu":
            device = next(self.module.parameters()).device
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        reducer = None if torch.compiler.is_compiling() else self.reducer
        versions = None if reducer is None else reducer.writes.begin(self.module)
        outputs = super().forward(*args, **kwargs)
        if reducer is not None and versions is not None:
            reducer.writes.end(self.module, versions)
        return outputs

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Replace the averaging of gradients, as `DistributedDataParallel.register_comm_hook` does.

        Args:
            state: Passed to the hook.
            hook: Called with `state` and a bucket that has the interface of `torch.distributed.GradBucket`, such as
                torch's own `fp16_compress_hook` and `powerSGD_hook`. It returns a future of the averaged buffer.

        Call it on every rank before the first backward.

        Raises:
            ConfigError: It was called before.
        """
        if self.reducer is not None:
            self.reducer.register_comm_hook(state, hook)


class DDPOptimizer(OptimizerWrapper):
    """Optimizer wrapper of replicated models; gradients are averaged in backward."""

    model: DDPModel
    _checked: Sequence[tuple[list[nn.Parameter], int]] = ()

    def _begin_accumulation(self, num_items: float | None) -> None:
        lists = [(group["params"], len(group["params"])) for group in self.param_groups]
        if [(id(one), size) for one, size in lists] != [(id(one), size) for one, size in self._checked]:
            for index in range(len(lists)):
                self._check_known(self.group_parameters(index), f"optimizer.param_groups[{index}]")
            self._checked = lists
        super()._begin_accumulation(num_items)
        if self.model.reducer is not None:
            settings = self.model.reducer.settings
            settings.note_items(self._accumulation.num_items, self._accumulation.num_averaged)
            settings.hyperparameters = Hyperparameters.of(self.optim)

    def _check_known(self, parameters: Sequence[Any], where: str) -> None:
        reducer = self.model.reducer
        if reducer is not None and any(isinstance(one, torch.Tensor) and not reducer.knows(one) for one in parameters):
            raise ConfigError(
                f"{where} got a parameter that the model did not have at boost(), whose gradient would not be averaged"
                " over the ranks: add modules before boost(), frozen if they train later"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the model had at boost().

        Raises:
            ConfigError: One is of a module that was added later, whose gradient would not be averaged.
        """
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        self._check_known(members, "add_param_group()")
        super().add_param_group({**param_group, "params": members})

    def _backward_context(self) -> AbstractContextManager[None]:
        reducer = self.model.reducer
        return nullcontext() if reducer is None else reducer.collecting()

    def _unscale_gradients(self) -> None:
        if self.model.reducer is not None and not self._accumulation.is_unscaled:
            self.model.reducer.reduce_rest()
        super()._unscale_gradients()

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self.model.reducer is None:
            return super()._step_with_closure(closure)
        return super()._step_with_closure(lambda: _mean_over_ranks(closure()))

    def _end_step(self) -> None:
        super()._end_step()
        if self.model.reducer is not None:
            self.model.reducer.end_step(self._num_steps)

    def _note_clipping(self, limit: float) -> None:
        if self.model.reducer is not None:
            self.model.reducer.settings.note_clipping(limit)

    def restore_accumulation(self, accumulation: AccumulationState, num_microbatches: int) -> None:
        super().restore_accumulation(accumulation, num_microbatches)
        if self.model.reducer is not None:
            self.model.reducer.mark_local()


def _mean_over_ranks(loss: Any) -> Any:
    """Return the mean of the ranks' losses, with equal bits on all, so that an optimizer decides alike by it.

    Collective for a number or a tensor of one element; anything else is returned as it is.
    """
    is_tensor = isinstance(loss, torch.Tensor)
    if loss.numel() != 1 if is_tensor else not isinstance(loss, (int, float)):
        return loss
    mean = all_reduce_numbers([float(loss)])[0] / group_size()
    return torch.full_like(loss, mean, requires_grad=False) if is_tensor else mean
