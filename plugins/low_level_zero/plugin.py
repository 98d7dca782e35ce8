"""The strategy: every rank holds all weights, and updates its share of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.comm import group_size, new_cpu_group, new_mesh, timeout_scope
from booster.core.module_sync import check_materialized, move_to_device, sync_module_states
from booster.core.plain_torch import refuse_plain_training
from booster.data import shard_dataloader
from booster.errors import ConfigError
from booster.interface import Boosted, MemoryRequest, ModelWrapper, OptimizerWrapper, RankMemory
from booster.mixed_precision.fp16 import log_rank_zero
from booster.mixed_precision.loss_scaler import LossScalerConfig
from booster.plugins.base import DistributedPlugin, arguments_of
from booster.plugins.sharding.elementwise import require_elementwise
from booster.plugins.sharding.optimizer import new_loss_scaler
from booster.plugins.sharding.precision import DTYPES, WeightPrecision
from booster.plugins.sync_batch_norm import convert_batch_norm
from booster.validation import check_flag, check_memory_is_apart

from .config import ZeroArguments, ZeroSettings
from .flat_params import Sharding
from .memory import zero_memory
from .model import ZeroModel
from .optimizer import ZeroOptimizer


class LowLevelZeroPlugin(DistributedPlugin):
    """ZeRO stages 1 and 2: every rank holds all weights, and updates its share of them.

    Memory per rank of P, N parameters with Adam: fp32 4N weights + 4N (stage 1) or 4N/P (stage 2) gradients + 8N/P
    states; fp16 and bf16 with fp32 masters 2N + 2N or 4N/P + 12N/P; and the buckets in flight. Sent and received per
    step: 2(P-1)/P of the weights' bytes, as by DistributedDataParallel. Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", SC 2020.

    The user's optimizer must be elementwise, as torch's own but LBFGS, Adafactor, Muon and SparseAdam are, or declare
    how it runs on shards; see `booster.interface.ShardAware`.

    Collective: every rank must make it, with the same arguments but for `verbose`.

    Args:
        stage: 1: optimizer states (and masters) are divided among the ranks; local gradients are kept whole, so that
            `no_sync` saves communication. 2: gradients too; every backward reduces them.
        precision: "fp16" (with loss scaling), "bf16" or "fp32": dtype of weights, gradients and computation;
            fp32 leaves the weights as they are.
        initial_scale: fp16's loss scale to begin with.
        min_scale: The scale never falls below.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale when overflows lower it.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is lowered.
        max_scale: The scale never grows above.
        max_norm: Clip gradients to this norm at every step; 0: don't.
        norm_type: Order of that norm.
        reduce_bucket_size_in_m: 2**20 elements of buffers for buckets in flight; a bucket has at most a quarter of it.
        communication_dtype: Dtype in which gradients travel; None: their own. On the CPU they are summed in
            fp32 in any case.
        overlap_communication: Reduce gradients while backward continues; False: stage 1 reduces once before the step.
        overlap_allgather: Let the weights travel while the next forward continues, each operator waiting for those that
            it reads; read weights through the boosted model then, which waits for them.
        cpu_offload: Keep masters and optimizer states in host memory. On the CPU there is nothing to move.
        master_weights: Keep fp32 masters of fp16 and bf16 weights; False: the optimizer updates the rounded weights.
        cast_inputs: Cast floating inputs of the model to its format.
        extra_dp_size: Shard within groups of world size / extra_dp_size ranks, and replicate over the groups: less
            traffic between groups for more memory.
        verbose: Log skipped steps and changes of the loss scale on rank 0.
        sync_batch_norm: Batch normalisation uses the statistics of all ranks' batches, as one process would.
        broadcast_buffers: Give all ranks the first rank's buffers before each forward in training.

    Raises:
        ConfigError: Before `launch`, or an argument that can't be; on all ranks if on any.
        DesyncError: The ranks' arguments differ.
    """

    @timeout_scope("setup")
    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        cast_inputs: bool = True,
        extra_dp_size: int = 1,
        verbose: bool = False,
        *,
        sync_batch_norm: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._arguments = arguments_of(ZeroArguments, given)
        self._loss_scale = arguments_of(LossScalerConfig, given)
        self._new_loss_scaler = functools.partial(new_loss_scaler, self._loss_scale, verbose=verbose)
        self._agree(lambda: self._check_arguments(verbose))
        # Ranks next to each other share the shards: they are likelier to be on one machine.
        self._mesh = new_mesh(self._device.type, (extra_dp_size, group_size() // extra_dp_size), ("replica", "shard"))
        self._agreement_group = None if self._device.type == "cpu" else new_cpu_group()
        if cpu_offload and self._device.type == "cpu":
            log_rank_zero("cpu_offload=True changes nothing: weights and states are in host memory already")

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [*self._mesh.get_all_groups(), self._agreement_group]

    def _check_arguments(self, verbose: bool) -> None:
        self._arguments.check(group_size())
        check_flag("verbose", verbose)
        self._loss_scale.check()

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

    def axis_sizes(self) -> dict[str, int]:
        return {"replica": self._mesh.size(0), "shard": self._mesh.size(1)}

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        if self._device.type == "cpu" and parameter_dtype.itemsize < 4:
            return torch.float32
        return self._arguments.communication_dtype or parameter_dtype

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        check_materialized(model)
        if optimizer is None:
            return
        require_elementwise(optimizer)
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        check_memory_is_apart(model, trained)
        if self._arguments.communication_dtype is not None and any(
            one.dtype.itemsize > 4 for one in trained if self._arguments.dtype is None
        ):
            raise ConfigError(
                f"communication_dtype={self._arguments.communication_dtype} would shorten the gradients of parameters"
                " that have more than 32 bits: leave it out"
            )

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        move_to_device(model, optimizer, self._device)
        sync_module_states(model)
        if self._arguments.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def config_fingerprint(self) -> list[str]:
        facts = [f"{name}={getattr(self._arguments, name)!r}" for name in ZeroArguments.__slots__]
        return [*facts, *self._loss_scale.fingerprint]

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        arguments, is_primary = self._arguments, self.dp_rank == 0
        broadcasts = arguments.broadcast_buffers and self.dp_size > 1
        boosted = ZeroModel(model, None, is_primary=is_primary, broadcasts_buffers=broadcasts)
        wrapped = None
        if optimizer is not None:
            scaler = self._new_loss_scaler() if arguments.precision == "fp16" else None
            wrapped = ZeroOptimizer(optimizer, boosted, self._settings(), loss_scaler=scaler, is_primary=is_primary)
        if arguments.dtype is not None:
            precision = WeightPrecision(arguments.dtype, cast_inputs=arguments.cast_inputs)
            precision.cast(model)  # what is left: frozen parameters and buffers
            boosted.precision = precision
        if self.dp_size > 1:
            refuse_plain_training(boosted, untrained=model.parameters() if optimizer is None else ())
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def _settings(self) -> ZeroSettings:
        arguments = self._arguments
        has_replicas = arguments.extra_dp_size > 1
        offloads = arguments.cpu_offload and self._device.type != "cpu"
        return ZeroSettings(
            stage=arguments.stage,
            sharding=Sharding(
                num_shards=self._mesh.size(1),
                rank=self._mesh.get_local_rank("shard"),
                is_primary=self._mesh.get_local_rank("replica") == 0,
                max_bucket_numel=arguments.max_bucket_numel,
                keeps_masters=arguments.master_weights,
                master_device=torch.device("cpu") if offloads else None,
            ),
            dtype=arguments.dtype,
            agreement_group=self._agreement_group,
            shard_group=self._mesh.get_group("shard") if has_replicas else None,
            replica_group=self._mesh.get_group("replica") if has_replicas else None,
            communication_dtype=arguments.communication_dtype,
            overlaps=arguments.overlap_communication,
            overlaps_gathering=arguments.overlap_allgather,
            max_norm=float(arguments.max_norm),
            norm_type=float(arguments.norm_type),
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        if not isinstance(optimizer, ZeroOptimizer):
            raise ConfigError(
                "no_sync() needs the optimizer that boost() returned, which holds the gradients: write"
                " booster.no_sync(model, optimizer)"
            )
        return optimizer.no_sync()

    def estimate_memory(self, question: MemoryRequest) -> RankMemory:
        return zero_memory(
            question,
            self._arguments,
            num_shards=self._mesh.size(1),
            num_replicas=self._mesh.size(0),
            offloads=self._arguments.cpu_offload and self._device.type != "cpu",
        )

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        precisions = ("bf16", "fp32")
        return [{"stage": stage, "precision": precision} for precision in precisions for stage in (1, 2)]
