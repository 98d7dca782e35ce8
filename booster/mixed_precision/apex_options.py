"""What an Apex optimization level stands for, and which overrides Apex allows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from booster.errors import ConfigError

__all__ = ["ApexOptions", "resolve_apex_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexOptions:
    """A level with its overrides applied; see `FP16ApexMixedPrecision` for the fields.

    Attributes:
        cast_model_type: The format that weights and inputs are cast to; None: not cast.
        loss_scale: A number, or "dynamic".
    """

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | str
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24


_LEVELS = {
    "O0": ApexOptions(
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
    "O1": ApexOptions(
        cast_model_type=None,
        patch_torch_functions=True,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale="dynamic",
    ),
    "O2": ApexOptions(
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    "O3": ApexOptions(
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
}
_FLAGS = {True: True, False: False, "True": True, "False": False}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def resolve_apex_options(opt_level: str, *, num_losses: int = 1, **overrides: Any) -> ApexOptions:
    """Returns the options of a level with the overrides that are not None.

    Args:
        opt_level: 'O0' to 'O3'.
        num_losses: Only 1.
        **overrides: Fields of `ApexOptions` as the user gave them.

    Raises:
        ConfigError: An unknown level, or an override that makes no sense with it.
    """
    if opt_level not in _LEVELS:
        raise ConfigError(
            f"opt_level={opt_level!r} is not known: pass 'O0', 'O1', 'O2' or 'O3' (the letter O and a digit)"
        )
    if num_losses != 1:
        raise ConfigError(
            f"num_losses={num_losses!r}: one precision object keeps no scalers per loss, because every boosted"
            " optimizer has its own. Leave it out, and boost one optimizer per loss that needs a scale of its own"
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
                f"patch_torch_functions=True with opt_level={opt_level!r}: autocast is what O1 does, on fp32 weights."
                " Leave it out, or use opt_level='O1'"
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
        raise ConfigError(f"{name}={value!r} is no truth value: pass True or False, or leave it out")
    return _FLAGS[value]


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is False and name == "cast_model_type":
        return None
    if value not in _DTYPES:
        raise ConfigError(
            f"{name}={value!r} is no format to train in here: pass torch.float16, torch.bfloat16 or torch.float32"
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
        raise ConfigError(f'loss_scale={value!r} is no factor for losses: pass a positive number or "dynamic"')
    return scale


def _check_limits(options: ApexOptions) -> None:
    low, high = options.min_loss_scale, options.max_loss_scale
    if options.loss_scale != "dynamic" and low is not None:
        raise ConfigError(
            f"min_loss_scale={low!r} limits a dynamic loss scale, and this one is constant"
            f" ({options.loss_scale!r}): leave it out, or pass loss_scale='dynamic'"
        )
    for name, value in (("min_loss_scale", low), ("max_loss_scale", high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ConfigError(f"{name}={value!r} is no loss scale: pass a positive number, for example 2**24")
