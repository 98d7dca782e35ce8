"""The plugin's arguments, checked one by one before anything is allocated, and what they mean for an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.errors import ConfigError
from booster.plugins.sharding.precision import DTYPES
from booster.validation import check_clipping, check_flag, check_replicas, is_non_nan_number

from .flat_params import Sharding

_MEBI = 2**20
_BUCKET_BUFFERS = 4  # of a bucket's size at most: two that are sent, and what is received for them


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroArguments:
    """See `LowLevelZeroPlugin`."""

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
        """Dtype of the weights; None: their own."""
        return DTYPES[self.precision]

    @property
    def max_bucket_numel(self) -> int:
        """Elements of a bucket, so that all buckets in flight fit into `reduce_bucket_size_in_m`."""
        return max(1, int(self.reduce_bucket_size_in_m * _MEBI) // _BUCKET_BUFFERS)

    def check(self, world_size: int) -> None:
        """Raise for what can't be.

        Raises:
            ConfigError: Such an argument.
        """
        if self.stage not in (1, 2) or isinstance(self.stage, bool):
            raise ConfigError(
                f"stage={self.stage!r} is not a stage of this plugin: give 1, which divides optimizer states among the"
                " ranks, or 2, which divides gradients too; GeminiPlugin and TorchFSDPPlugin divide parameters as well"
            )
        if self.precision not in DTYPES:
            raise ConfigError(f"precision={self.precision!r} is not known: choose one of {', '.join(DTYPES)}")
        self._check_numbers()
        self._check_communication_dtype()
        check_replicas(self.extra_dp_size, world_size)
        for name in ("overlap_communication", "overlap_allgather", "cpu_offload", "master_weights", "cast_inputs"):
            check_flag(name, getattr(self, name))
        for name in ("sync_batch_norm", "broadcast_buffers"):
            check_flag(name, getattr(self, name))

    def _check_numbers(self) -> None:
        check_clipping(self.max_norm, self.norm_type)
        if not is_non_nan_number(self.reduce_bucket_size_in_m) or not 0 < self.reduce_bucket_size_in_m < float("inf"):
            raise ConfigError(
                f"reduce_bucket_size_in_m={self.reduce_bucket_size_in_m!r} holds no gradient: give a number of 2**20"
                " elements above 0, such as 12"
            )

    def _check_communication_dtype(self) -> None:
        allowed = (None, torch.float32, torch.bfloat16, torch.float16)
        if self.communication_dtype not in allowed:
            raise ConfigError(
                f"communication_dtype={self.communication_dtype!r} is not a dtype of gradient reduction: give"
                " torch.float32, torch.bfloat16, torch.float16, or None for the gradients' own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """How an optimizer is sharded.

    Attributes:
        stage: 1: optimizer states are sharded; 2: gradients too.
        sharding: Sharding of the weights.
        dtype: Dtype that weights are cast to; None: they stay.
        data_parallel_group: All ranks among which data are divided; None: the world.
        agreement_group: The same ranks, on the CPU; optional, defaults to `data_parallel_group`.
        shard_group: The ranks among them that share the shards; None: the world.
        replica_group: The ranks that hold copies of this rank's shards; None: there are none.
        counting_group: The ranks that hold the whole gradient between them; None: those that share the shards.
        communication_dtype: Format in which gradients travel; None: their own.
        overlaps: Gradients are reduced while backward continues.
        overlaps_gathering: Weights travel while the next forward continues.
        max_norm: Gradients are clipped to this norm at every step; 0: they are not.
        norm_type: Order of that norm.
    """

    stage: int
    sharding: Sharding
    dtype: torch.dtype | None
    data_parallel_group: dist.ProcessGroup | None = None
    agreement_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    counting_group: dist.ProcessGroup | None = None
    communication_dtype: torch.dtype | None = None
    overlaps: bool = True
    overlaps_gathering: bool = False
    max_norm: float = 0.0
    norm_type: float = 2.0
