"""Base class of the plugins that cast the weights to one dtype and shard the optimizer."""

from __future__ import annotations

import torch

from booster.comm import group_size
from booster.interface import LossScaler
from booster.plugins.base import DistributedPlugin

from .config import ShardedConfig
from .optimizer import new_loss_scaler
from .precision import DTYPES


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

    def _new_loss_scaler(self) -> LossScaler | None:
        """Return the loss scaler of a new optimizer, or None for other precisions than fp16."""
        if self._config.precision != "fp16":
            return None
        return new_loss_scaler(self._config.loss_scale, verbose=self._config.verbose)
