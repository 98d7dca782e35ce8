"""Plugin of ZeRO stages 1 and 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import broadcast, timeout_scope
from booster.compatibility import takes_foreign
from booster.core.plain_torch import refuse_plain_training
from booster.errors import ConfigError
from booster.lazy_init import check_materialized, move_to_device
from booster.logger import log_rank_zero
from booster.plugins.base import WrappedPair, check_gradients_add_up, check_memory_is_apart, check_weights_stay_equal
from booster.plugins.sharding.config import ShardGroups, ZeroConfig
from booster.plugins.sharding.elementwise import require_elementwise
from booster.plugins.sharding.plugin import ReplicatedPlugin
from booster.plugins.sync_batch_norm import convert_batch_norm

from .model import ZeroModel
from .optimizer import ZeroOptimizer


class LowLevelZeroPlugin(ReplicatedPlugin):
    """ZeRO stages 1 and 2: every rank holds all weights and updates its shard of them.

    Memory per rank of P, N parameters with Adam: fp32 4N weights + 4N (stage 1) or 4N/P (stage 2) gradients + 8N/P
    states; fp16 and bf16 with fp32 masters 2N + 2N or 4N/P + 12N/P; and the buckets in flight. Sent and received per
    step: 2(P-1)/P of the weights' bytes, as by DistributedDataParallel. Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", SC 2020.

    The user's optimizer must be elementwise, as torch's own but LBFGS, Adafactor, Muon and SparseAdam are, or declare
    how it runs on shards; see `booster.interface.ShardAware`.

    Collective: every rank must create it, with equal arguments except `verbose`.

    Args:
        stage: ZeRO stage. Stage 1 shards optimizer states and master weights, and keeps local gradients unsharded, so
            `no_sync` saves communication. Stage 2 also shards gradients; every backward reduces them.
        precision: Dtype of weights, gradients and computation: "fp16" (with loss scaling), "bf16" or "fp32"; "fp32"
            keeps the model's dtypes. Optional, defaults to bf16 if the device computes in it; otherwise to fp32 on the
            CPU, and to fp16 on accelerators.
        initial_scale: Initial loss scale of fp16.
        min_scale: Minimum loss scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is lowered.
        max_scale: Maximum loss scale.
        max_norm: Maximum gradient norm at every step; 0 disables clipping.
        norm_type: Order of the norm.
        reduce_bucket_size_in_m: Size of all buffers for buckets in flight, in 2**20 elements; a bucket has at most a
            quarter of it.
        communication_dtype: Dtype in which gradients travel; optional, defaults to the gradients' dtype. The CPU sums
            fp16 and bf16 in fp32, NCCL in this dtype: fp32 is exact there, too, for twice the bytes of the reduction.
        overlap_communication: If True, reduce gradients while backward continues; if False, stage 1 reduces once before
            the step.
        overlap_allgather: If True, all-gather the weights while the next forward runs; each operator waits for the
            weights that it reads. Weights must then be read through the boosted model, which waits for them.
        cpu_offload: If True, keep master weights and optimizer states in host memory. No effect on the CPU.
        master_weights: If True, keep fp32 master weights of fp16 and bf16 weights; if False, the optimizer updates the
            rounded weights.
        cast_inputs: If True, cast floating-point inputs of the model to its dtype.
        extra_dp_size: Number of replicas: weights are sharded within groups of world size / extra_dp_size ranks, which
            trades memory for less traffic between groups.
        verbose: If True, log skipped steps and changes of the loss scale on rank 0.
        sync_batch_norm: If True, batch normalization uses the statistics of all ranks' batches, as one process would.
        broadcast_buffers: If True, a step makes the buffers equal on all ranks: the first rank's, and of instance norms
            the mean of the ranks' statistics.

    Raises:
        ConfigError: `launch` was not called, or an argument is invalid; raised on all ranks.
        DesyncError: The ranks' arguments differ.
    """

    _config: ZeroConfig

    @timeout_scope("setup")
    @takes_foreign("fp8_communication", "use_fp8", call="making a {}")
    def __init__(
        self,
        stage: int = 1,
        precision: str | None = None,
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
        self._set_config(ZeroConfig, given)
        self._make_groups(extra_dp_size)
        if cpu_offload and self._device.type == "cpu":
            log_rank_zero("cpu_offload=True changes nothing: weights and states are in host memory already")

    @property
    def zero_stage(self) -> int:
        return self._config.stage

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        check_materialized(model)
        check_weights_stay_equal(model, self.dp_size)
        check_gradients_add_up(model, self.dp_size)
        if optimizer is None:
            return
        require_elementwise(optimizer)
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        check_memory_is_apart(model, trained)
        if self._config.communication_dtype is not None and any(
            one.dtype.itemsize > 4 for one in trained if self._config.dtype is None
        ):
            raise ConfigError(
                f"communication_dtype={self._config.communication_dtype} would shorten the gradients of parameters"
                " that have more than 32 bits: leave it out"
            )

    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: None = None) -> None:
        move_to_device(model, optimizer, self._device)
        broadcast([*model.parameters(), *model.buffers()])
        if self._config.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: None) -> WrappedPair:
        config = self._config
        broadcasts = config.broadcast_buffers and self.dp_size > 1
        boosted = ZeroModel(model, None, is_primary=self.dp_rank == 0, broadcasts_buffers=broadcasts)
        wrapped = None
        if optimizer is not None:
            wrapped = ZeroOptimizer(optimizer, boosted, config, ShardGroups(**self._shard_groups))
        config.set_precision(boosted, cast_inputs=config.cast_inputs)
        if self.dp_size > 1:
            refuse_plain_training(boosted, untrained=model.parameters() if optimizer is None else ())
        return boosted, wrapped

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        precisions = ("bf16", "fp32")
        return [{"stage": stage, "precision": precision} for precision in precisions for stage in (1, 2)]
