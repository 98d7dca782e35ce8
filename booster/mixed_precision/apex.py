"""Native implementation of NVIDIA Apex's optimization levels O0 to O3."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.errors import ConfigError
from booster.interface import LossScaler, MixedPrecision
from booster.logger import log_rank_zero
from booster.validation import is_non_nan_number

from .autocast import AutocastMixedPrecision, check_no_float16_weights
from .fp16 import OriginalWeights, attach_masters, cast_floats, cast_weights, low_precision_to_fp32
from .loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexOptions:
    """Options of a level after overrides; see `FP16ApexMixedPrecision` for the fields.

    Attributes:
        cast_model_type: Dtype that weights and inputs are cast to, or None for no cast.
        loss_scale: Number or "dynamic".
    """

    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    loss_scale: float | str = 1.0
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24


_LEVELS = {
    "O0": ApexOptions(cast_model_type=torch.float32),
    "O1": ApexOptions(patch_torch_functions=True, loss_scale="dynamic"),
    "O2": ApexOptions(
        cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"
    ),
    "O3": ApexOptions(cast_model_type=torch.float16),
}
_FLAGS = {True: True, False: False, "True": True, "False": False}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def resolve_apex_options(opt_level: str, *, num_losses: int = 1, **overrides: Any) -> ApexOptions:
    """Apply the overrides that are not None to the options of a level.

    Args:
        opt_level: 'O0' to 'O3'.
        num_losses: Only 1.
        **overrides: Fields of `ApexOptions` as passed by the user.

    Raises:
        ConfigError: The level is unknown, or an override conflicts with it.
    """
    if opt_level not in _LEVELS:
        raise ConfigError(
            f"opt_level={opt_level!r} is not known: pass 'O0', 'O1', 'O2' or 'O3' (the letter O and a digit)"
        )
    if num_losses != 1:
        raise ConfigError(
            f"num_losses={num_losses!r}: loss scalers belong to boosted optimizers, not to losses. Leave it out, and"
            " boost one optimizer per loss that needs a separate scale"
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    _check_level(opt_level, given)
    for name in ("keep_batchnorm_fp32", "master_weights", "patch_torch_functions"):
        if name in given:
            given[name] = _flag(name, given[name])
    for name in ("cast_model_type", "cast_model_outputs"):
        if name in given:
            given[name] = _dtype(name, given[name])
    if "loss_scale" in given:
        given["loss_scale"] = _loss_scale(given["loss_scale"])
    options = dataclasses.replace(_LEVELS[opt_level], **given)
    _check_limits(options)
    return options


def _check_level(opt_level: str, given: dict[str, Any]) -> None:
    if opt_level != "O1":
        if given.get("patch_torch_functions"):
            raise ConfigError(
                f"patch_torch_functions=True with opt_level={opt_level!r}: autocast needs the fp32 weights of O1. Leave"
                " it out, or use opt_level='O1'"
            )
        return
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if name in given:
            raise ConfigError(
                f"{name}={given[name]!r} with opt_level='O1', whose weights and batch norms are fp32 anyway: leave it"
                " out, or use opt_level='O2'"
            )
    if given.get("cast_model_type", False) not in (False, torch.float32):
        raise ConfigError(
            f"cast_model_type={given['cast_model_type']} with opt_level='O1', which casts around functions and keeps"
            " fp32 weights: leave it out, or use opt_level='O2' or 'O3'"
        )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, str)) or value not in _FLAGS:
        raise ConfigError(f"{name} must be a bool, got {value!r}: pass True or False, or leave it out")
    return _FLAGS[value]


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is False and name == "cast_model_type":
        return None
    if value not in _DTYPES:
        raise ConfigError(
            f"{name}={value!r} is not a supported dtype: pass torch.float16, torch.bfloat16 or torch.float32"
        )
    return value  # type: ignore[no-any-return]


def _loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f'loss_scale={value!r} is not a loss scale: pass a positive number or "dynamic"')
    return scale


def _check_limits(options: ApexOptions) -> None:
    low, high = options.min_loss_scale, options.max_loss_scale
    if options.loss_scale != "dynamic" and low is not None:
        raise ConfigError(
            f"min_loss_scale={low!r} limits a dynamic loss scale, but the scale is constant ({options.loss_scale!r}):"
            " leave it out, or pass loss_scale='dynamic'"
        )
    for name, value in (("min_loss_scale", low), ("max_loss_scale", high)):
        if value is not None and not (is_non_nan_number(value) and value > 0):
            raise ConfigError(f"{name}={value!r} is not a loss scale: pass a positive number, for example 2**24")


class FP16ApexMixedPrecision(MixedPrecision):
    """Mixed precision with the semantics of `apex.amp.initialize`, without Apex.

    | level | weights | matrix multiplications | batch norms | masters | loss scale |
    | --- | --- | --- | --- | --- | --- |
    | O0 | fp32 | fp32 | fp32 | - | 1 |
    | O1 | fp32 | float16, by autocast | fp32 | - | dynamic |
    | O2 | float16 | float16 | fp32 | fp32 | dynamic |
    | O3 | float16 | float16 | float16 | - | 1 |

    Two differences from Apex: a step with overflowed gradients is skipped under a constant loss scale, too (Apex
    applies it), and every level returns fp32 unless `cast_model_outputs` is set (Apex's O1 returns float16).

    Args:
        opt_level: 'O0', 'O1', 'O2' or 'O3'. The arguments below override its options unless they are None.
        loss_scale: Number, or "dynamic": starts at 2**16, doubles after 2000 clean steps, halves on overflow.
        keep_batchnorm_fp32: If True, batch norms stay in fp32 when weights are cast. Also "True" and "False".
        master_weights: If True, the optimizer updates fp32 master weights.
        min_loss_scale: Lower limit of the dynamic scale.
        max_loss_scale: Upper limit of the dynamic scale.
        cast_model_type: Dtype of the weights, or False for no cast, as in Apex.
        patch_torch_functions: If True, use autocast; O1 only.
        cast_model_outputs: Dtype of floating-point outputs.
        num_losses: Only 1, as every boosted optimizer has its own loss scaler.
        verbosity: 0 for no logs; 1 to log skipped steps and changes of the scale on rank 0.

    Raises:
        ConfigError: The level is unknown, or an override conflicts with it.
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
        self._report = log_rank_zero if verbosity > 0 else None
        self._new_scaler()  # validates the numbers
        self._autocast = AutocastMixedPrecision(torch.float16) if self.options.patch_torch_functions else None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix multiplications, or None if it is the parameters' dtype."""
        return torch.float16 if self._autocast is not None else self.options.cast_model_type

    @property
    def keeps_masters(self) -> bool:
        return bool(self.options.master_weights)

    def config_fingerprint(self) -> list[str]:
        return [*super().config_fingerprint(), repr(self.options)]

    def prepare(self, model: nn.Module) -> OriginalWeights:
        """Cast the model's weights in place according to the level; return their values before.

        Args:
            model: User's model; its Parameter objects are kept.

        Raises:
            ConfigError: The weights are float16 and the level is O1, which does not cast them.
        """
        options = self.options
        originals: OriginalWeights = {}
        if options.cast_model_type is not None:
            originals = cast_weights(
                model,
                options.cast_model_type,
                keep_batchnorm_fp32=options.keep_batchnorm_fp32,
                keep_originals=options.master_weights,
            )
        if self._autocast is not None:
            check_no_float16_weights(model, "fp16_apex")
        return originals

    def configure(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        criterion: Callable[..., Any] | None,
        prepared: OriginalWeights | None = None,
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Install casts, master weights and the loss scaler; return model, optimizer and criterion."""
        if self._autocast is not None:
            criterion = self._autocast.configure(model, None, criterion)[2]
        super().configure(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.loss_scaler = self._new_scaler()
            if self.options.master_weights:
                attach_masters(model, optimizer, prepared)
        return model, optimizer, criterion

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return an autocast context for O1, a null context for other levels."""
        return nullcontext() if self._autocast is None else self._autocast.forward_context(device_type)

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating-point arguments of the forward to `cast_model_type`, if set."""
        dtype = self.options.cast_model_type
        return (args, kwargs) if dtype is None else (cast_floats(dtype, args), cast_floats(dtype, kwargs))

    def convert_outputs(self, outputs: Any) -> Any:
        """Cast floating-point outputs to `cast_model_outputs`, or low-precision outputs to fp32."""
        dtype = self.options.cast_model_outputs
        return low_precision_to_fp32(outputs) if dtype is None else cast_floats(dtype, outputs)

    def _new_scaler(self) -> LossScaler | None:
        scale, low, high = self.options.loss_scale, self.options.min_loss_scale, self.options.max_loss_scale
        if not isinstance(scale, str):
            return None if scale == 1.0 else ConstantLossScaler(scale)
        initial = max(min(2.0**16, high), 0.0 if low is None else low)
        config = LossScaleConfig(initial, 2.0, 0.5, 2000, min_scale=low, max_scale=high)
        return DynamicLossScaler(config, self._report)
