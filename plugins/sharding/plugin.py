"""Base class of the plugins that cast the weights to one dtype and shard the optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from booster.comm import group_size
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.plugins.base import DistributedPlugin

from .config import DTYPES, ShardedConfig
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


class ShardedPlugin(DistributedPlugin):
    """Base of the ZeRO, Gemini and hybrid plugins, whose options are a `ShardedConfig`."""

    _config: ShardedConfig

    def _check_config(self) -> None:
        """Raise on all ranks if the config is invalid on any, or if the ranks' configs differ. Collective."""
        self._verify_arguments(lambda: self._config.check(group_size()))

    def config_fingerprint(self) -> list[str]:
        return self._config.fingerprint

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        if self._device.type == "cpu" and parameter_dtype.itemsize < 4:
            return torch.float32
        return self._config.reduce_dtype or parameter_dtype

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        return local_accumulation(optimizer)
