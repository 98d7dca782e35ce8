"""Arguments of the plugin with their checks, and the settings of the optimizer wrapper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.errors import ConfigError
from booster.plugins.sharding.precision import DTYPES
from booster.validation import check_clipping, check_flag, check_replicas, is_non_nan_number

from .flat_params import Sharding

_MEBI = 2**20
_BUCKET_BUFFERS = 4  # per bucket size: two send buffers and two receive buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroArguments:
    """Arguments of `LowLevelZeroPlugin`."""

    stage: int
    precision: str
    max_norm: float
    norm_type: float
    reduce_bucket_size_in_m: float
    communication_dtype: torch.dtype | None
    overlap_communication: bool
    overlap_allgather: bool
    cpu_offload: bool
    master_weights: bool
    cast_inputs: bool
    extra_dp_size: int
    sync_batch_norm: bool
    broadcast_buffers: bool

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights; None keeps the model's."""
        return DTYPES[self.precision]

    @property
    def max_bucket_numel(self) -> int:
        """Maximum number of elements of a bucket; all buckets in flight fit into `reduce_bucket_size_in_m`."""
        return max(1, int(self.reduce_bucket_size_in_m * _MEBI) // _BUCKET_BUFFERS)

    def check(self, world_size: int) -> None:
        """Check all arguments.

        Raises:
            ConfigError: An argument is invalid.
        """
        if self.stage not in (1, 2) or isinstance(self.stage, bool):
            raise ConfigError(
                f"stage={self.stage!r} is not a stage of this plugin: give 1, which divides optimizer states among the"
                " ranks, or 2, which divides gradients too; GeminiPlugin and TorchFSDPPlugin divide parameters as well"
            )
        if self.precision not in DTYPES:
            raise ConfigError(f"precision={self.precision!r} is not known: choose one of {', '.join(DTYPES)}")
        check_clipping(self.max_norm, self.norm_type)
        if not is_non_nan_number(self.reduce_bucket_size_in_m) or not 0 < self.reduce_bucket_size_in_m < float("inf"):
            raise ConfigError(
                f"reduce_bucket_size_in_m={self.reduce_bucket_size_in_m!r} holds no gradient: give a number of 2**20"
                " elements above 0, such as 12"
            )
        if self.communication_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"communication_dtype={self.communication_dtype!r} is not a dtype of gradient reduction: give"
                " torch.float32, torch.bfloat16, torch.float16, or None for the gradients' own"
            )
        check_replicas(self.extra_dp_size, world_size)
        for name in ("overlap_communication", "overlap_allgather", "cpu_offload", "master_weights", "cast_inputs"):
            check_flag(name, getattr(self, name))
        for name in ("sync_batch_norm", "broadcast_buffers"):
            check_flag(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """Sharding settings of an optimizer.

    Attributes:
        stage: ZeRO stage: 1 shards optimizer states, 2 also gradients.
        sharding: Sharding of the weights.
        dtype: Dtype that weights are cast to; optional, defaults to no cast.
        data_parallel_group: All data-parallel ranks; optional, defaults to the world group.
        control_group: CPU group of the same ranks; optional, defaults to `data_parallel_group`.
        shard_group: Ranks that share the shards; optional, defaults to the world group.
        replica_group: Ranks with replicas of this rank's shards, if any.
        grad_norm_group: Ranks that hold the full gradient together; optional, defaults to `shard_group`.
        communication_dtype: Dtype of gradient reduction; optional, defaults to the gradients' dtype.
        overlaps: If True, gradients are reduced while backward continues.
        overlap_param_gather: If True, weights are all-gathered while the next forward runs.
        max_norm: Maximum gradient norm at every step; 0 disables clipping.
        norm_type: Order of the norm.
    """

    stage: int
    sharding: Sharding
    dtype: torch.dtype | None
    data_parallel_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    grad_norm_group: dist.ProcessGroup | None = None
    communication_dtype: torch.dtype | None = None
    overlaps: bool = True
    overlap_param_gather: bool = False
    max_norm: float = 0.0
    norm_type: float = 2.0
