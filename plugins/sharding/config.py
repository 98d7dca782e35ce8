"""Configs that the plugins with sharded optimizers share, the weights' precision, and the groups of their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.device import computes_in_bf16
from booster.errors import ConfigError
from booster.interface import MixedPrecision, ModelWrapper
from booster.logger import log_rank_zero
from booster.mixed_precision.fp16 import cast_floats, low_precision_to_fp32
from booster.mixed_precision.loss_scaler import DynamicLossScaler, LossScaleConfig
from booster.plugins.base import PluginConfig
from booster.validation import check_clipping, check_flag, check_replicas, is_non_nan_number

_MEBI = 2**20
_BUCKET_BUFFERS = 4  # of ZeRO, per bucket size: two send buffers and two receive buffers

# Weight dtype by precision name; None keeps the model's dtypes.
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_precision(device: torch.device) -> str:
    """Return the name of the default precision: bf16 where the device computes in it, else fp32 on a CPU, else fp16."""
    if computes_in_bf16(device):
        return "bf16"
    return "fp32" if device.type == "cpu" else "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradClipConfig:
    """Clipping of the gradients at every step.

    Attributes:
        max_norm: Maximum norm; 0 disables clipping.
        norm_type: Order of the norm.
    """

    max_norm: float
    norm_type: float

    @property
    def fingerprint(self) -> list[str]:
        """Options that must be equal on all ranks."""
        return [f"{name}={getattr(self, name)!r}" for name in self.__slots__]

    def check(self) -> None:
        """Raise `ConfigError` if one of them is invalid."""
        check_clipping(self.max_norm, self.norm_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedConfig(PluginConfig):
    """Options of every plugin that casts the weights to one dtype and shards the optimizer."""

    precision: str
    master_weights: bool
    sync_batch_norm: bool
    broadcast_buffers: bool
    verbose: bool
    clip: GradClipConfig
    loss_scale: LossScaleConfig

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights; None keeps the model's."""
        return DTYPES[self.precision]

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype of gradient reduction; None for the gradients' dtype."""
        return None

    def new_loss_scaler(self) -> DynamicLossScaler | None:
        """Return the loss scaler of a new optimizer, or None for other precisions than fp16."""
        return new_loss_scaler(self.loss_scale, verbose=self.verbose) if self.precision == "fp16" else None

    def set_precision(self, boosted: ModelWrapper, *, cast_inputs: bool, outputs_fp32: bool = True) -> None:
        """Set the precision of a boosted model, and cast what its wrappers have not: frozen parameters and buffers."""
        if self.dtype is not None:
            precision = WeightPrecision(self.dtype, cast_inputs=cast_inputs, outputs_fp32=outputs_fp32)
            precision.cast(boosted.unwrap())
            boosted.precision = precision

    def _check_shared(self) -> None:
        if not isinstance(self.precision, str) or self.precision not in DTYPES:
            raise ConfigError(f"precision={self.precision!r} is not known: choose one of {', '.join(DTYPES)}")
        for name in ("master_weights", "sync_batch_norm", "broadcast_buffers", "verbose"):
            check_flag(name, getattr(self, name))
        self.clip.check()
        self.loss_scale.check()


def new_loss_scaler(arguments: LossScaleConfig, *, verbose: bool) -> DynamicLossScaler:
    """Return a loss scaler that logs on rank 0: every skipped step and change, or only the first skipped step."""
    return DynamicLossScaler(arguments, log_rank_zero if verbose else _report_first_skip())


def _report_first_skip() -> Callable[[str], None]:
    """Return a function that logs the first skipped step only, because a run usually begins with several."""
    reported: list[str] = []

    def report(text: str) -> None:
        if "skipped" in text and not reported:
            reported.append(text)
            log_rank_zero(
                f"{text}. More may follow until the scale is low enough: start lower with"
                " a smaller initial_scale, log all with verbose=True, or check optimizer.step_was_skipped"
            )

    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """Process groups that the shards are distributed over.

    Attributes:
        num_shards: Number of ranks that share the shards.
        rank: Rank of this process among them.
        is_primary: If True, this rank saves its shards; its replicas do not.
        data_parallel_group: All data-parallel ranks; optional, defaults to the world group.
        control_group: CPU group of the same ranks; optional, defaults to `data_parallel_group`.
        shard_group: Ranks that share the shards; optional, defaults to the world group.
        replica_group: Ranks with replicas of this rank's shards, if any.
        grad_norm_group: Ranks that hold the full gradient together; optional, defaults to `shard_group`.
        has_extra_axes: Whether there are axes of the user's own, along which gradients may differ before the step.
        first_rank: First of the ranks that hold one gradient together; optional, defaults to that of
            `grad_norm_group`.
        data_ranks: Data ranks whose samples this rank's gradients are of; optional, defaults to this rank's.
    """

    num_shards: int
    rank: int
    is_primary: bool
    data_parallel_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    grad_norm_group: dist.ProcessGroup | None = None
    first_rank: int | None = None
    has_extra_axes: bool = False
    data_ranks: Sequence[int] | None = None


class WeightPrecision(MixedPrecision):
    """Computation in the weights' dtype.

    Args:
        dtype: Dtype of weights, buffers and computation.
        cast_inputs: If True, cast floating-point inputs to that dtype.
        outputs_fp32: If True, cast low-precision outputs to fp32.
    """

    def __init__(self, dtype: torch.dtype, *, cast_inputs: bool, outputs_fp32: bool = True) -> None:
        self._dtype = dtype
        self._outputs_fp32 = outputs_fp32
        self._cast_inputs = cast_inputs

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._dtype

    def describe(self) -> str:
        return f"{str(self._dtype).removeprefix('torch.')} weights"

    def cast(self, model: nn.Module) -> None:
        """Cast floating-point parameters and buffers in place; Parameter objects stay the same."""
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dtype != self._dtype:
                tensor.data = tensor.data.to(self._dtype)

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floats(self._dtype, (args, kwargs)) if self._cast_inputs else (args, kwargs)

    def convert_outputs(self, outputs: Any) -> Any:
        return low_precision_to_fp32(outputs) if self._outputs_fp32 else outputs


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
