"""fp32 weights, low-precision matrix multiplications: torch's autocast around the forward and the criterion."""

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
from .loss_scaler import LossScaleArguments


class AutocastMixedPrecision(MixedPrecision):
    """Runs forward and criterion under `torch.autocast`, and returns their float16 and bfloat16 tensors in fp32.

    Args:
        dtype: The format of what autocast casts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the matrix multiplications."""
        return self._dtype

    def new_loss_scaler(self) -> LossScaler | None:
        """Returns a loss scaler for one optimizer. Default: None, losses are not scaled."""
        return None

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the model its context, the optimizer its own loss scaler, and wraps the criterion; returns the three.

        An `nn.Module` criterion stays one.
        """
        super().configure(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.loss_scaler = self.new_loss_scaler()
        if criterion is not None:
            criterion = _with_autocast(criterion, self, device_type_of(model))
        return model, optimizer, criterion

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Returns the context that forward and criterion run in."""
        return torch.autocast(device_type, self._dtype)

    def convert_outputs(self, outputs: Any) -> Any:
        """Returns the outputs with float16 and bfloat16 tensors in fp32."""
        return low_precision_to_fp32(outputs)


class FP16TorchMixedPrecision(AutocastMixedPrecision):
    """float16 autocast with dynamic loss scaling: the numbers of `torch.autocast` with `torch.amp.GradScaler`.

    Args:
        init_scale: The loss scale to begin with.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale after an overflow.
        growth_interval: Steps without overflow before the scale grows.

    Raises:
        ConfigError: A number out of its range.
    """

    def __init__(
        self,
        init_scale: float = 2**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(torch.float16)
        self._loss_scale = LossScaleArguments(
            initial_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        self._loss_scale.check()

    def prepare(self, model: nn.Module) -> None:
        """Refuses weights that are float16 already.

        Raises:
            ConfigError: A trainable parameter is float16.
        """
        refuse_float16_weights(model, "fp16")

    def new_loss_scaler(self) -> LossScaler | None:
        """Returns a loss scaler for one optimizer."""
        return self._loss_scale.new_scaler()

    def config_fingerprint(self) -> list[str]:
        return [*super().config_fingerprint(), *self._loss_scale.facts]


class BF16MixedPrecision(AutocastMixedPrecision):
    """bfloat16 autocast; bfloat16 has fp32's range, so losses are not scaled."""

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
    """An `nn.Module` criterion that runs under autocast; its attributes are read through."""

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
            if name == "criterion":  # not there yet: __init__ did not run
                raise
            return getattr(self.criterion, name)


def device_type_of(model: ModelWrapper) -> str:
    """Returns the kind of device that the model's parameters are on; "cpu" where it has none."""
    first = next(model.parameters(), None)
    return "cpu" if first is None else first.device.type


def refuse_float16_weights(model: nn.Module, name: str) -> None:
    """Raises where float16 weights would be updated directly, without fp32 masters.

    Args:
        model: The user's model.
        name: The precision that was asked for.

    Raises:
        ConfigError: A trainable parameter is float16.
    """
    found = [key for key, value in model.named_parameters() if value.requires_grad and value.dtype == torch.float16]
    if found:
        raise ConfigError(
            f"mixed_precision={name!r} keeps fp32 weights, and {len(found)} trainable parameter(s) are float16 (the"
            f" first: {found[0]!r}), whose small updates would round away: pass the model in fp32 (model.float()), or"
            " use 'fp16_naive', which keeps fp32 masters of float16 weights"
        )
