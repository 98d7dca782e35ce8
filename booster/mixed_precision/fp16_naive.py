"""float16 weights with fp32 masters and dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface.mixed_precision import MixedPrecision
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision.half_weights import HalfWeights, cast_floats, low_precision_to_fp32
from booster.mixed_precision.loss_scale_arguments import LossScaleArguments

__all__ = ["FP16NaiveMixedPrecision", "log_on_master"]


class FP16NaiveMixedPrecision(MixedPrecision):
    """The whole model in float16; the optimizer updates fp32 masters, which begin at the exact values before the cast.

    A parameter costs 2 bytes and 2 of gradient in float16, and 8 bytes for its master and the master's gradient.

    Args:
        initial_scale: The loss scale to begin with.
        min_scale: The scale never falls below.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale when overflows lower it.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: How many overflows it takes before the scale is lowered.
        max_scale: The scale never grows above.
        log_num_zeros_in_grad: Count the zeros of every step's gradients, before clipping: logged on rank 0, and in
            `num_zeros_in_grad`.
        verbose: Log skipped steps and changes of the scale on rank 0.

    Attributes:
        num_zeros_in_grad: Zeros in the last step's gradients that this rank holds; None where they are not counted.

    Raises:
        ConfigError: A number out of its range.
    """

    def __init__(
        self,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        log_num_zeros_in_grad: bool = False,
        verbose: bool = False,
    ) -> None:
        _check_flag("log_num_zeros_in_grad", log_num_zeros_in_grad)
        _check_flag("verbose", verbose)
        self._loss_scale = LossScaleArguments(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._loss_scale.check()
        self._report = log_on_master if verbose else None
        self._weights = HalfWeights(torch.float16)
        self._counts_zeros = log_num_zeros_in_grad
        self.num_zeros_in_grad: int | None = None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the matrix multiplications."""
        return torch.float16

    def config_fingerprint(self) -> list[str]:
        return [
            *super().config_fingerprint(),
            *self._loss_scale.facts,
            f"log_num_zeros_in_grad={self._counts_zeros}",
        ]

    @property
    def keeps_masters(self) -> bool:
        return True

    def prepare(self, model: nn.Module) -> None:
        """Casts the model to float16 in place, and remembers its values until `configure`.

        Args:
            model: The user's model; its Parameter objects stay the same ones.
        """
        self._weights.cast(model)

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the model its casts, the optimizer its masters and loss scaler; returns the three."""
        super().configure(model, optimizer, criterion)
        if optimizer is None:
            self._weights.forget(model)
            return model, optimizer, criterion
        self._weights.attach_masters(model, optimizer)
        optimizer.loss_scaler = self._loss_scale.new_scaler(self._report)
        if self._counts_zeros:
            optimizer.register_gradient_hook(self._count_zeros)
        return model, optimizer, criterion

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the forward's arguments with floating tensors in float16."""
        return cast_floats(torch.float16, args), cast_floats(torch.float16, kwargs)

    def convert_outputs(self, outputs: Any) -> Any:
        """Returns the outputs with float16 and bfloat16 tensors in fp32."""
        return low_precision_to_fp32(outputs)

    def _count_zeros(self, gradients: Sequence[torch.Tensor]) -> None:
        counts = [gradient.numel() - _num_nonzero(gradient) for gradient in gradients]
        self.num_zeros_in_grad = sum(counts)
        log_on_master(f"zeros in the gradients: {self.num_zeros_in_grad}")


def log_on_master(message: str) -> None:
    """Logs one line on rank 0."""
    from booster.logger import get_dist_logger  # not at the top: only who logs pays for the logger

    get_dist_logger("booster").info(message, ranks=[0])


def _num_nonzero(gradient: torch.Tensor) -> int:
    stored = gradient.coalesce().values() if gradient.is_sparse else gradient
    return int(torch.count_nonzero(stored))


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is no truth value: pass True or False")
