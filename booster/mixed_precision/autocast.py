"""Mixed precision with `torch.autocast` and fp32 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.errors import ConfigError
from booster.interface import LossScaler, MixedPrecision

from .fp16 import low_precision_to_fp32
from .loss_scaler import DynamicLossScaler, LossScaleConfig


class AutocastMixedPrecision(MixedPrecision):
    """Autocast around forward and criterion; their float16 and bfloat16 outputs are cast to fp32.

    Args:
        dtype: Dtype of autocast.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix multiplications."""
        return self._dtype

    def new_loss_scaler(self) -> LossScaler | None:
        """Create a loss scaler for one optimizer, or return None (the default) for no loss scaling."""
        return None

    def configure(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        criterion: Callable[..., Any] | None,
        prepared: Any = None,
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Install autocast and the loss scaler and wrap the criterion; return model, optimizer and criterion.

        An `nn.Module` criterion is wrapped by an `nn.Module`.
        """
        super().configure(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.loss_scaler = self.new_loss_scaler()
        if criterion is not None:
            criterion = _with_autocast(criterion, self, device_type_of(model))
        return model, optimizer, criterion

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the autocast context of forward and criterion."""
        return torch.autocast(device_type, self._dtype)

    def convert_outputs(self, outputs: Any) -> Any:
        """Cast float16 and bfloat16 outputs to fp32."""
        return low_precision_to_fp32(outputs)


class FP16TorchMixedPrecision(AutocastMixedPrecision):
    """float16 autocast with dynamic loss scaling, bit-equal to `torch.autocast` with `torch.amp.GradScaler`.

    Args:
        init_scale: Initial loss scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of consecutive steps without overflow before the scale grows.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(torch.float16)
        self._loss_scale = LossScaleConfig(
            initial_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        self._loss_scale.check()

    def prepare(self, model: nn.Module) -> None:
        """Reject float16 weights.

        Raises:
            ConfigError: A trainable parameter is float16.
        """
        check_no_float16_weights(model, "fp16")

    def new_loss_scaler(self) -> LossScaler | None:
        """Create a loss scaler for one optimizer."""
        return DynamicLossScaler(self._loss_scale)

    def config_fingerprint(self) -> list[str]:
        return [*super().config_fingerprint(), *self._loss_scale.fingerprint]


class BF16MixedPrecision(AutocastMixedPrecision):
    """bfloat16 autocast without loss scaling, as bfloat16 has the range of fp32."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


def _with_autocast(
    criterion: Callable[..., Any], precision: AutocastMixedPrecision, device_type: str
) -> Callable[..., Any]:
    if isinstance(criterion, nn.Module):
        return _CriterionModule(criterion, precision, device_type)

    @functools.wraps(criterion, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with precision.forward_context(device_type):
            result = criterion(*args, **kwargs)
        return precision.convert_outputs(result)

    return run


class _CriterionModule(nn.Module):
    """Autocast wrapper of an `nn.Module` criterion that forwards attribute access."""

    def __init__(self, criterion: nn.Module, precision: AutocastMixedPrecision, device_type: str) -> None:
        super().__init__()
        self.criterion = criterion
        self.training = criterion.training
        self._precision = precision
        self._device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.forward_context(self._device_type):
            result = self.criterion(*args, **kwargs)
        return self._precision.convert_outputs(result)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "criterion":  # __init__ has not set it yet
                raise
            return getattr(self.criterion, name)


def device_type_of(model: ModelWrapper) -> str:
    """Return the type of the device that the model computes on; its parameters may be offloaded from there."""
    return model._compute_device_type


def check_no_float16_weights(model: nn.Module, name: str) -> None:
    """Reject trainable float16 weights, which would be updated without fp32 master weights.

    Args:
        model: User's model.
        name: Name of the requested precision, for the message.

    Raises:
        ConfigError: A trainable parameter is float16.
    """
    found = [key for key, value in model.named_parameters() if value.requires_grad and value.dtype == torch.float16]
    if found:
        raise ConfigError(
            f"mixed_precision={name!r} needs fp32 weights, but {len(found)} trainable parameter(s) are float16 (first:"
            f" {found[0]!r}), which rounds small updates away: pass the model in fp32 (model.float()), or use"
            " 'fp16_naive', which keeps fp32 master weights"
        )
