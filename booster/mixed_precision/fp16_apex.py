"""NVIDIA Apex's optimization levels O0 to O3, done natively."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from booster.interface.mixed_precision import LossScaler, MixedPrecision
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision.apex_options import ApexOptions, resolve_apex_options
from booster.mixed_precision.autocast import AutocastMixedPrecision, refuse_float16_weights
from booster.mixed_precision.fp16_naive import log_on_master
from booster.mixed_precision.half_weights import HalfWeights, cast_floats, low_precision_to_fp32
from booster.mixed_precision.loss_scaler import ConstantLossScaler, DynamicLossScaler

__all__ = ["FP16ApexMixedPrecision"]


class FP16ApexMixedPrecision(MixedPrecision):
    """The semantics of `apex.amp.initialize`, without Apex.

    | level | weights | matrix multiplications | batch norms | masters | loss scale |
    | --- | --- | --- | --- | --- | --- |
    | O0 | fp32 | fp32 | fp32 | - | 1 |
    | O1 | fp32 | float16, by autocast | fp32 | - | dynamic |
    | O2 | float16 | float16 | fp32 | fp32 | dynamic |
    | O3 | float16 | float16 | float16 | - | 1 |

    Two differences: a step whose gradients overflowed is skipped under a constant loss scale too (Apex applied it), and
    fp32 is what every level returns unless `cast_model_outputs` says otherwise (Apex's O1 returned float16).

    Args:
        opt_level: 'O0', 'O1', 'O2' or 'O3'; the arguments below override what it stands for, None keeps it.
        loss_scale: A number, or "dynamic": begins at 2**16, doubles after 2000 clean steps, halves on overflow.
        keep_batchnorm_fp32: Leave batch norms in fp32 when weights are cast; also the strings "True" and "False".
        master_weights: Update fp32 masters of low-precision weights.
        min_loss_scale: The dynamic scale never falls below.
        max_loss_scale: The dynamic scale never grows above.
        cast_model_type: The format of the weights; False as in Apex: not cast.
        patch_torch_functions: Autocast; with O1 only.
        cast_model_outputs: The format of floating outputs.
        num_losses: Only 1: every boosted optimizer has a loss scaler of its own.
        verbosity: 0 logs nothing; 1 logs skipped steps and changes of the scale on rank 0.

    Raises:
        ConfigError: An unknown level, or an override that makes no sense with it.
    """

    def __init__(
        self,
        opt_level: str = "O1",
        loss_scale: float | str | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2**24,
        *,
        cast_model_type: torch.dtype | Literal[False] | None = None,
        patch_torch_functions: bool | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
    ) -> None:
        self.options: ApexOptions = resolve_apex_options(
            opt_level,
            loss_scale=loss_scale,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            cast_model_outputs=cast_model_outputs,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            num_losses=num_losses,
        )
        self._report = log_on_master if verbosity > 0 else None
        self._new_scaler()  # checks the numbers now
        self._autocast = AutocastMixedPrecision(torch.float16) if self.options.patch_torch_functions else None
        self._weights = HalfWeights(
            self.options.cast_model_type,
            keep_batchnorm_fp32=self.options.keep_batchnorm_fp32,
            remember=self.options.master_weights,
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the matrix multiplications; None where it is the parameters' own."""
        return torch.float16 if self._autocast is not None else self.options.cast_model_type

    @property
    def keeps_masters(self) -> bool:
        return bool(self.options.master_weights)

    def config_fingerprint(self) -> list[str]:
        return [*super().config_fingerprint(), repr(self.options)]

    def prepare(self, model: nn.Module) -> None:
        """Casts the model's weights in place, as the level says.

        Args:
            model: The user's model; its Parameter objects stay the same ones.

        Raises:
            ConfigError: O1, whose weights stay as they are, on float16 weights.
        """
        self._weights.cast(model)
        if self._autocast is not None:
            refuse_float16_weights(model, "fp16_apex")

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the model its casts, the optimizer its masters and loss scaler; returns the three."""
        if self._autocast is not None:
            criterion = self._autocast.configure(model, None, criterion)[2]
        super().configure(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.loss_scaler = self._new_scaler()
            if self.options.master_weights:
                self._weights.attach_masters(model, optimizer)
        self._weights.forget(model)
        return model, optimizer, criterion

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Returns autocast for O1, an empty context for the other levels."""
        return nullcontext() if self._autocast is None else self._autocast.forward_context(device_type)

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the forward's arguments with floating tensors in the weights' format, where that is a choice."""
        dtype = self.options.cast_model_type
        return (args, kwargs) if dtype is None else (cast_floats(dtype, args), cast_floats(dtype, kwargs))

    def convert_outputs(self, outputs: Any) -> Any:
        """Returns floating outputs in `cast_model_outputs`, or low-precision ones in fp32."""
        dtype = self.options.cast_model_outputs
        return low_precision_to_fp32(outputs) if dtype is None else cast_floats(dtype, outputs)

    def _new_scaler(self) -> LossScaler | None:
        scale, low, high = self.options.loss_scale, self.options.min_loss_scale, self.options.max_loss_scale
        if not isinstance(scale, str):
            return None if scale == 1.0 else ConstantLossScaler(scale)
        initial = max(min(2.0**16, high), 0.0 if low is None else low)
        return DynamicLossScaler(initial, 2.0, 0.5, 2000, min_scale=low, max_scale=high, report=self._report)
