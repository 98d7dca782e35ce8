"""Base class of the plugins that cast the weights to one dtype and shard the optimizer."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from booster.comm import group_size, new_cpu_group, new_mesh, sum_dtype
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.logger import log_rank_zero
from booster.plugins.base import DistributedPlugin, arguments_of

from .config import DTYPES, ShardedConfig, default_precision
from .optimizer import ShardedOptimizer


def local_accumulation(optimizer: OptimizerWrapper | None) -> AbstractContextManager[None]:
    """Return the context of `no_sync` of a boosted optimizer.

    Raises:
        ConfigError: It is not a boosted optimizer.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(
            "no_sync() needs the optimizer that boost() returned, which holds the gradients: write"
            " booster.no_sync(model, optimizer)"
        )
    return optimizer.no_sync()


def dtype_of_sums(reduce_dtype: torch.dtype, device: torch.device, num_shards: int) -> torch.dtype:
    """Return the dtype in which gradients are summed that travel in `reduce_dtype` to their shards.

    The CPU sums fp16 and bf16 in fp32. With one shard nothing travels to it, and replicas all-reduce fp32 sums.
    """
    return sum_dtype(reduce_dtype) if device.type == "cpu" or num_shards == 1 else reduce_dtype


@functools.cache  # once a process
def _log_default_precision(precision: str, device_type: str) -> None:
    reason = "computes in it" if precision == "bf16" else "has no units for bf16"
    log_rank_zero(f"precision={precision!r} by default, as this {device_type} {reason}: give precision= to choose")


class ShardedPlugin(DistributedPlugin):
    """Base of the ZeRO, Gemini and hybrid plugins, whose options are a `ShardedConfig`."""

    _config: ShardedConfig

    def _set_config(self, cls: type[ShardedConfig], given: dict[str, Any]) -> None:
        """Create the config from the constructor's arguments.

        Collective: raises on all ranks if the config is invalid on any, or if the ranks' configs differ, as the
        default precision of hosts with different devices.
        """
        if given["precision"] is None:
            given["precision"] = default_precision(self._device)
            _log_default_precision(given["precision"], self._device.type)
        self._config = arguments_of(cls, given)
        self._verify_arguments(lambda: self._config.check(group_size()))

    def config_fingerprint(self) -> list[str]:
        return self._config.fingerprint

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

    @property
    def precision(self) -> str:
        return self._config.precision

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        return dtype_of_sums(self._config.reduce_dtype or parameter_dtype, self._device, self._num_shards)

    @property
    def _num_shards(self) -> int:
        """Number of ranks that a parameter's gradient is sharded over."""
        return self.axis_sizes()["shard"]

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        return local_accumulation(optimizer)


class ReplicatedPlugin(ShardedPlugin):
    """Base of the ZeRO and Gemini plugins, whose ranks are replicas of a group of ranks that share the shards."""

    def _make_groups(self, num_replicas: int) -> None:
        # Neighbouring ranks share the shards, because they are likely to be on one machine.
        self._mesh = new_mesh(self._device.type, (num_replicas, group_size() // num_replicas), ("replica", "shard"))
        self._control_group = None if self._device.type == "cpu" else new_cpu_group()
        self._shard_groups: dict[str, Any] = {  # arguments of `ShardGroups`
            "num_shards": self._mesh.size(1),
            "rank": self._mesh.get_local_rank("shard"),
            "is_primary": self._mesh.get_local_rank("replica") == 0,
            "control_group": self._control_group,
            "shard_group": self._mesh.get_group("shard") if num_replicas > 1 else None,
            "replica_group": self._mesh.get_group("replica") if num_replicas > 1 else None,
        }

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [*self._mesh.get_all_groups(), self._control_group]

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def axis_sizes(self) -> dict[str, int]:
        return {"replica": self._mesh.size(0), "shard": self._mesh.size(1)}
