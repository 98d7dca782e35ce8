"""The `TorchFSDPPlugin`, on torch's FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.optim import Optimizer

from booster.comm import group_size, max_of_numbers, new_cpu_group, timeout_scope
from booster.compatibility import takes_foreign
from booster.core.plain_torch import refuse_plain_gradient, refuse_plain_training
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.logger import log_rank_zero
from booster.mixed_precision import mixed_precision_names
from booster.plugins.base import (
    DistributedPlugin,
    WrappedPair,
    arguments_of,
    check_gradients_add_up,
    check_memory_is_apart,
)
from booster.plugins.sharding.config import ShardGroups, new_loss_scaler
from booster.plugins.sharding.deferred_init import Materializer
from booster.plugins.sharding.plugin import dtype_of_sums, local_accumulation
from booster.plugins.sync_batch_norm import convert_batch_norm

from .config import FSDPConfig, OptimizerKind, kind_of
from .mesh import groups_of, make_mesh
from .optimizer import FSDPOptimizer
from .wrap import FSDPModelBuilder


class TorchFSDPPlugin(DistributedPlugin):
    """Fully sharded data parallelism on torch's FSDP2: weights, gradients and optimizer states are sharded on dim 0.

    Wrapped modules become parameter groups: the weights of a group are all-gathered for forward and backward, and its
    gradients are reduce-scattered when they are ready. Memory per rank of P, N fp32 parameters with Adam: 4N/P weights
    + 4N/P gradients + 8N/P states, and two unsharded groups. Sent and received per step: 3(P-1)/P of the weights'
    bytes, 2(P-1)/P with SHARD_GRAD_OP. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
    Parallel", VLDB 2023.

    The argument names are those of torch's FSDP. Beyond FSDP2: the user's optimizer is kept, with all of its param
    groups, and steps on plain tensors; the gradient norm is that of the full model; ranks may use different modules;
    0-dim parameters and those of another dtype than their group's are replicated; models on the meta device are
    initialized independently of the number of ranks.

    Collective: every rank must construct it, with the same arguments except `verbose`.

    Args:
        process_group: Group of all ranks; optional, defaults to the world group. With HYBRID_SHARD also a pair (shard
            group, replicate group), or a 2-D mesh whose first dimension replicates.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP": weights stay gathered between forward and backward;
            "HYBRID_SHARD": shard within groups of ranks and replicate across them; "NO_SHARD": replicate only. Or a
            member of torch's `ShardingStrategy`.
        cpu_offload: If True, or torch's `CPUOffload` or `CPUOffloadPolicy`, shards, gradients and states are kept in
            host memory. No effect on the CPU.
        auto_wrap_policy: Policy of `torch.distributed.fsdp.wrap` that selects the modules to wrap, besides the root;
            optional, defaults to the blocks that a transformers model names, else the elements of the outermost
            lists of modules of one class, and embeddings that do not train; to none in a model of less than 8 MiB.
        mixed_precision: torch's `MixedPrecisionPolicy` (or `MixedPrecision`): shards keep their dtype, weights are
            gathered and computed with in `param_dtype`; float16 includes loss scaling. Gradients travel in
            `reduce_dtype`, by default `param_dtype`: the CPU sums fp16 and bf16 in fp32, NCCL in the dtype that
            travels. Optional, defaults to the Booster's `mixed_precision`.
        ignored_modules: Modules whose parameters are replicated. Their gradients are averaged as well.
        param_init_fn: Function that materializes and initializes a module with tensors on the meta device; optional,
            defaults to `reset_parameters()`, or the model's own initialization in transformers.
        sync_module_states: If True, weights and buffers are broadcast from rank 0; otherwise they are checked to be
            equal.
        reshard_after_forward: As in `fully_shard`: whether groups are resharded between forward and backward, or the
            number of ranks to reshard over, with which all ranks must use the same modules. Optional, defaults to all
            groups but the root.
        max_norm: Maximum gradient norm at every step; 0 disables clipping.
        norm_type: Order of that norm.
        extra_dp_size: Number of replicas with HYBRID_SHARD; optional, defaults to one per host.
        initial_scale: Initial loss scale for float16, if `mixed_precision` is given here.
        min_scale: Lower bound of the scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is lowered.
        max_scale: Upper bound of the scale.
        verbose: If True, parameter groups, skipped steps and changes of the loss scale are logged on rank 0.
        sync_batch_norm: If True, batch normalization uses the statistics of all ranks' batches.
        broadcast_buffers: If True, a step makes the buffers equal on all ranks: the first rank's, and of instance norms
            the mean of the ranks' statistics.

    Raises:
        ConfigError: `launch` was not called, or an argument or a combination is invalid; on all ranks if on any.
        DesyncError: The ranks' arguments differ.
    """

    @timeout_scope("setup")
    @takes_foreign("backward_prefetch", "fp8_communication", call="making a {}")
    def __init__(
        self,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | DeviceMesh | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        cpu_offload: bool | CPUOffload | OffloadPolicy | None = None,
        auto_wrap_policy: Any = None,
        mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
        reshard_after_forward: bool | int | None = None,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        *,
        extra_dp_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        verbose: bool = False,
        sync_batch_norm: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._config = arguments_of(FSDPConfig, given)
        self._verify_arguments(lambda: self._config.check(group_size()))
        self._make_groups()

    def config_fingerprint(self) -> list[str]:
        return self._config.fingerprint

    def _make_groups(self) -> None:
        ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", group_size()))
        shape = self._config.mesh_shape(group_size(), max(1, group_size() // ranks_per_host))
        self._mesh = make_mesh(self._config.process_group, self._device.type, shape)
        is_cpu = self._device.type == "cpu"
        shard_group = self._mesh.get_group("shard")
        self._control_group = None if is_cpu else new_cpu_group()
        self._order_group = shard_group if is_cpu else new_cpu_group(shard_group)
        if is_cpu and self._config.offloads:
            log_rank_zero("cpu_offload changes nothing: weights and states are in host memory already")

    def _groups(self) -> list[dist.ProcessGroup | None]:
        given = groups_of(self._config.process_group)
        made = [group for group in self._mesh.get_all_groups() if group not in given]
        return [*made, self._control_group, None if self._order_group in given else self._order_group]

    def supported_precisions(self) -> list[str]:
        return ["fp32", *mixed_precision_names()]

    def control_precision(self) -> bool:
        return self._config.mixed_precision is not None

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    @property
    def zero_stage(self) -> int:
        return self._config.zero_stage

    def axis_sizes(self) -> dict[str, int]:
        return {"replica": self._mesh.size(0), "shard": self._mesh.size(1)}

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        reduce_dtype = self._config.precision_dtypes.reduce_dtype or parameter_dtype
        return dtype_of_sums(reduce_dtype, self._device, self._mesh.size(1))

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> OptimizerKind:
        self._builder().check(model)
        check_gradients_add_up(model, self.dp_size)
        check_memory_is_apart(model, list(model.parameters()))
        self._materializer(model).check()
        return OptimizerKind.ELEMENTWISE if optimizer is None else kind_of(optimizer)

    def place(
        self, model: nn.Module, optimizer: Optimizer | None, checked: OptimizerKind = OptimizerKind.ELEMENTWISE
    ) -> OptimizerKind:
        if optimizer is not None:  # each rank has tested its own optimizer: a larger kind is valid for smaller ones
            checked = OptimizerKind(max_of_numbers([checked], self._control_group)[0])
        self._materializer(model).sync_initialized()
        if self._config.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)
        return checked

    def _materializer(self, model: nn.Module) -> Materializer:
        config = self._config
        return Materializer(model, self._device, param_init_fn=config.param_init_fn, sync=config.sync_module_states)

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: OptimizerKind) -> WrappedPair:
        originals = list(model.parameters())
        boosted = self._builder().build(model, self._materializer(model))
        wrapped = None
        dtypes = self._config.precision_dtypes
        if optimizer is not None:
            scales = dtypes.param_dtype is torch.float16
            scaler = new_loss_scaler(self._config.loss_scale, verbose=self._config.verbose) if scales else None
            groups = self._shard_groups()
            wrapped = FSDPOptimizer(optimizer, boosted, self._config, groups, placed, loss_scaler=scaler)
        for group in boosted.fsdp_groups if optimizer is None else ():
            group.on_gradients = refuse_plain_gradient
        untrained = [param.parameter for param in boosted.replicated_params.params] if optimizer is None else []
        refuse_plain_training(boosted, untrained=untrained, originals=originals)
        if self.control_precision():
            boosted.precision = dtypes
        if self._config.verbose:
            log_rank_zero(f"TorchFSDPPlugin: {boosted.describe_groups()}")
        return boosted, wrapped

    def _builder(self) -> FSDPModelBuilder:
        return FSDPModelBuilder(
            config=self._config, mesh=self._mesh, device=self._device, order_group=self._order_group
        )

    def _shard_groups(self) -> ShardGroups:
        has_replicas = self._mesh.size(0) > 1
        return ShardGroups(
            num_shards=self._mesh.size(1),
            rank=self._mesh.get_local_rank("shard"),
            is_primary=self._mesh.get_local_rank("replica") == 0,
            control_group=self._control_group,
            shard_group=self._mesh.get_group("shard"),
            replica_group=self._mesh.get_group("replica") if has_replicas else None,
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which every rank accumulates unsharded gradients, which need the memory, locally."""
        return local_accumulation(optimizer)

    def gathers_layers(self) -> bool:
        """Return True; see `Plugin.gathers_layers`."""
        return True

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        strategies: list[dict[str, Any]] = [
            {"sharding_strategy": "FULL_SHARD"},
            {"sharding_strategy": "SHARD_GRAD_OP"},
        ]
        if num_ranks % 2 == 0 and num_ranks > 2:
            strategies.append({"sharding_strategy": "HYBRID_SHARD", "extra_dp_size": 2})
        return [strategy | {"mixed_precision": half} for strategy in strategies] + strategies[:1]
