"""The `TorchFSDPPlugin`: torch's FSDP2, with what its users miss."""

from __future__ import annotations

import functools
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
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.comm import all_reduce_max, collective_device, group_size, new_cpu_group, patience
from booster.data import shard_dataloader
from booster.errors import ConfigError
from booster.interface import Boosted, MemoryQuestion, ModelWrapper, OptimizerWrapper, RankMemory
from booster.interface.plain_torch import refuse_plain_gradient, refuse_plain_training
from booster.mixed_precision import mixed_precision_names
from booster.mixed_precision.fp16_naive import log_on_master
from booster.mixed_precision.loss_scale_arguments import LossScaleArguments
from booster.plugins.distributed_plugin import DistributedPlugin, arguments_of
from booster.plugins.sharding.checks import check_memory_is_apart
from booster.plugins.sharding.loss_scale import new_loss_scaler
from booster.plugins.sharding.materializing import Materializer
from booster.plugins.sync_batch_norm import convert_batch_norm
from booster.plugins.torch_fsdp.assembly import Assembly
from booster.plugins.torch_fsdp.grouping import groups_of
from booster.plugins.torch_fsdp.memory import fsdp_memory
from booster.plugins.torch_fsdp.optimizer import FSDPOptimizer, OptimizerSettings
from booster.plugins.torch_fsdp.optimizer_kinds import OptimizerKind, kind_of
from booster.plugins.torch_fsdp.settings import FSDPArguments
from booster.plugins.torch_fsdp.unit_precision import UnitPrecision

__all__ = ["TorchFSDPPlugin"]


class TorchFSDPPlugin(DistributedPlugin):
    """Fully sharded data parallelism by torch's own FSDP2: weights, gradients and states are divided by rows.

    Modules become *units*: a unit's weights are gathered when it runs, forward or backward, and its gradients are
    reduce-scattered when they are there. Memory per rank of P, N parameters with Adam: 4N/P weights + 4N/P gradients +
    8N/P states, and two units whole. Sent and received per step: 3(P-1)/P of the weights' bytes, 2(P-1)/P with
    SHARD_GRAD_OP. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

    The names are those of torch's FSDP. Beside what it can do: the user's optimizer is kept, with all of its groups,
    and steps on plain tensors; the norm of gradients is that of the whole model; units may be used on some ranks and
    not on others; parameters without dimensions and those of another dtype than their unit's are kept whole; models on
    the meta device are initialised alike whatever the number of ranks.

    Collective: every rank must make it, with the same arguments but for `verbose`.

    Args:
        process_group: None: all ranks. A group of all ranks; with HYBRID_SHARD also a pair of groups, of those that
            share shards and of those that hold the same one, or a 2-D mesh whose first dimension replicates.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP": weights stay whole between forward and backward;
            "HYBRID_SHARD": shards within groups of ranks, and replicas over the groups; "NO_SHARD": replicas only. Or a
            member of torch's `ShardingStrategy`.
        cpu_offload: Keep shards, gradients and states in host memory: True, torch's `CPUOffload` or `CPUOffloadPolicy`.
            On the CPU there is nothing to move.
        auto_wrap_policy: A policy of `torch.distributed.fsdp.wrap` that says which modules become units, beside the
            root; None: the blocks that a transformers model names, else the elements of the largest `nn.ModuleList`s.
        mixed_precision: torch's `MixedPrecisionPolicy` (or `MixedPrecision`): shards stay as they are, and weights are
            gathered and computed with in `param_dtype`; float16 comes with loss scaling. None: the Booster's
            `mixed_precision` decides.
        ignored_modules: Modules whose parameters every rank keeps whole. Their gradients are averaged all the same.
        param_init_fn: Called with every module that has tensors on the meta device, to bring it to a device and
            initialise it; None: `reset_parameters()`, or the model's own initialisation in transformers.
        sync_module_states: Give all ranks the first rank's weights and buffers; False: the ranks have built the same,
            which is checked.
        reshard_after_forward: As `fully_shard` takes it: whether units are freed between forward and backward, or a
            number of ranks to divide them among, for which all ranks must use the same units; None: all but the root.
        max_norm: Clip gradients to this norm at every step; 0: don't.
        norm_type: Order of that norm.
        extra_dp_size: With HYBRID_SHARD the number of replicas; None: one per host.
        initial_scale: float16's loss scale to begin with, where `mixed_precision` is given here.
        min_scale: The scale never falls below.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale when overflows lower it.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: How many overflows it takes before the scale is lowered.
        max_scale: The scale never grows above.
        verbose: Log the units, skipped steps, and changes of the loss scale on rank 0.
        sync_batch_norm: Batch normalisation uses the statistics of all ranks' batches, as one process would.
        broadcast_buffers: Give all ranks the first rank's buffers before each forward in training.

    Raises:
        ConfigError: Before `launch`, or an argument that can't be, alone or beside another one; on all ranks if on any.
        DesyncError: The ranks' arguments differ.
    """

    @patience("setup")
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
        self._arguments = arguments_of(FSDPArguments, given)
        self._loss_scale = arguments_of(LossScaleArguments, given)
        self._new_loss_scaler = functools.partial(new_loss_scaler, self._loss_scale, verbose=verbose)
        self._agree(self._check_arguments)
        self._make_groups()

    def _check_arguments(self) -> None:
        self._arguments.check(group_size())
        self._loss_scale.check()

    def agreement_facts(self) -> list[str]:
        return [*self._arguments.facts, *self._loss_scale.facts]

    def _make_groups(self) -> None:
        self._strategy = self._arguments.strategy(group_size(), _num_hosts())
        self._mesh = self._arguments.make_mesh(self._device.type, self._strategy)
        is_cpu = self._device.type == "cpu"
        shard_group = self._mesh.get_group("shard")
        self._agreement_group = None if is_cpu else new_cpu_group()
        self._coordination_group = shard_group if is_cpu else new_cpu_group(shard_group)
        if is_cpu and self._arguments.offloads:
            log_on_master("cpu_offload changes nothing: weights and states are in host memory already")

    def _groups(self) -> list[dist.ProcessGroup | None]:
        given = groups_of(self._arguments.process_group)
        made = [group for group in self._mesh.get_all_groups() if group not in given]
        return [*made, self._agreement_group, None if self._coordination_group in given else self._coordination_group]

    def supported_precisions(self) -> list[str]:
        return ["fp32", *mixed_precision_names()]

    def control_precision(self) -> bool:
        return self._arguments.formats is not None

    def axis_sizes(self) -> dict[str, int]:
        return {"replica": self._mesh.size(0), "shard": self._mesh.size(1)}

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        formats = self._arguments.formats
        travels = parameter_dtype if formats is None else formats.reduce_dtype or formats.param_dtype or parameter_dtype
        is_summed_in_fp32 = self._device.type == "cpu" and travels.itemsize < 4
        return torch.float32 if is_summed_in_fp32 else travels

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._assembly().check(model)
        check_memory_is_apart(model, list(model.parameters()))
        self._materializer(model).check()
        self._kind = OptimizerKind.PIECES if optimizer is None else kind_of(optimizer)

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if optimizer is not None:
            self._agree_on_kind()
        self._materializer(model).place_real()
        if self._arguments.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def _agree_on_kind(self) -> None:
        """Finds out what the optimizer has to see, which ranks have tried by themselves and must not disagree on."""
        mine = torch.tensor([self._kind], dtype=torch.int64, device=collective_device(self._agreement_group))
        self._kind = OptimizerKind(int(all_reduce_max(mine, self._agreement_group)))

    def _materializer(self, model: nn.Module) -> Materializer:
        arguments = self._arguments
        return Materializer(
            model, self._device, param_init_fn=arguments.param_init_fn, sync=arguments.sync_module_states
        )

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        originals = list(model.parameters())
        boosted = self._assembly().assemble(model, self._materializer(model), self._device)
        wrapped = None
        formats = self._arguments.formats
        if optimizer is not None:
            scales = formats is not None and formats.param_dtype is torch.float16
            wrapped = FSDPOptimizer(
                optimizer,
                boosted,
                self._optimizer_settings(),
                loss_scaler=self._new_loss_scaler() if scales else None,
                is_primary=self.dp_rank == 0,
            )
        for unit in boosted.units if optimizer is None else ():
            unit.on_gradients = refuse_plain_gradient
        untrained = [member.parameter for member in boosted.whole.members] if optimizer is None else []
        refuse_plain_training(boosted, untrained=untrained, originals=originals)
        if formats is not None:
            boosted.precision = UnitPrecision(formats)
        if self._arguments.verbose:
            log_on_master(f"TorchFSDPPlugin: {boosted.describe_units()}")
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def _assembly(self) -> Assembly:
        arguments = self._arguments
        return Assembly(
            mesh=self._mesh,
            strategy=self._strategy,
            formats=arguments.formats,
            offload_policy=arguments.offload_policy(self._device),
            auto_wrap_policy=arguments.auto_wrap_policy,
            ignored_modules=arguments.ignored_modules or (),
            coordination_group=self._coordination_group,
            is_primary=self.dp_rank == 0,
            broadcasts_buffers=arguments.broadcast_buffers and self.dp_size > 1,
        )

    def _optimizer_settings(self) -> OptimizerSettings:
        return OptimizerSettings(
            kind=self._kind,
            agreement_group=self._agreement_group,
            shard_group=self._mesh.get_group("shard"),
            replica_group=self._mesh.get_group("replica") if self._mesh.size(0) > 1 else None,
            is_primary=self._mesh.get_local_rank("replica") == 0,
            max_norm=float(self._arguments.max_norm),
            norm_type=float(self._arguments.norm_type),
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Returns a context in which every rank adds up its own gradients, whole, for which it needs the memory."""
        if not isinstance(optimizer, FSDPOptimizer):
            raise ConfigError(
                "no_sync() needs the optimizer that boost() returned, which holds the gradients: write"
                " booster.no_sync(model, optimizer)"
            )
        return optimizer.no_sync()

    def estimate_memory(self, question: MemoryQuestion) -> RankMemory:
        is_cpu = self._device.type == "cpu"
        return fsdp_memory(question, self._assembly(), is_cpu=is_cpu, offloads=self._arguments.offloads and not is_cpu)

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


def _num_hosts() -> int:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", group_size()))
    return max(1, group_size() // local)
