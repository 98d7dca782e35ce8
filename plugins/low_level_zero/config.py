"""Options of ZeRO 1 and 2, with their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from booster.errors import ConfigError
from booster.plugins.sharding.config import DTYPES, ShardedConfig
from booster.validation import check_flag, check_replicas, is_non_nan_number

_MEBI = 2**20
_BUCKET_BUFFERS = 4  # per bucket size: two send buffers and two receive buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig(ShardedConfig):
    """Options of ZeRO, by the names of `LowLevelZeroPlugin`, which documents them."""

    stage: int
    reduce_bucket_size_in_m: float
    communication_dtype: torch.dtype | None
    overlap_communication: bool
    overlap_allgather: bool
    cpu_offload: bool
    cast_inputs: bool
    extra_dp_size: int

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.communication_dtype

    @property
    def max_bucket_numel(self) -> int:
        """Maximum number of elements of a bucket; all buckets in flight fit into `reduce_bucket_size_in_m`."""
        return max(1, int(self.reduce_bucket_size_in_m * _MEBI) // _BUCKET_BUFFERS)

    def check(self, world_size: int) -> None:
        if self.stage not in (1, 2) or isinstance(self.stage, bool):
            raise ConfigError(
                f"stage={self.stage!r} is not a stage of this plugin: give 1, which divides optimizer states among the"
                " ranks, or 2, which divides gradients too; GeminiPlugin and TorchFSDPPlugin divide parameters as well"
            )
        if self.precision not in DTYPES:
            raise ConfigError(f"precision={self.precision!r} is not known: choose one of {', '.join(DTYPES)}")
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
        for name in ("overlap_communication", "overlap_allgather", "cpu_offload", "cast_inputs"):
            check_flag(name, getattr(self, name))
        self._check_shared()
