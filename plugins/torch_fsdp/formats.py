"""FSDP mixed precision policy, from the types of FSDP1 or FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from booster.errors import ConfigError
from booster.interface import MixedPrecision as BoosterPrecision
from booster.plugins.sharding.checks import check_flag

__all__ = ["PrecisionDtypes", "check_mixed_precision", "is_module_class", "read_mixed_precision"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionDtypes:
    """Dtypes of FSDP's mixed precision.

    Attributes:
        param_dtype: Dtype of gathered weights and of computation; optional, defaults to that of the shards.
        reduce_dtype: Dtype of gradients in the reduce-scatter; optional, defaults to that of gathered weights.
        buffer_dtype: Dtype that floating-point buffers are cast to once; optional, by default they are not cast.
        output_dtype: Dtype of the root's floating-point outputs; optional, by default they are not cast.
        casts_root_inputs: If True, floating-point inputs of the model are cast to `param_dtype`.
        casts_unit_inputs: If True, floating-point inputs of wrapped modules are cast to `param_dtype`.
        keeps_own_format: Classes of modules that compute in the dtype of their weights.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts_root_inputs: bool = True
    casts_module_inputs: bool = True
    own_dtype_classes: tuple[type[nn.Module], ...] = ()

    def fsdp2_policy(self, *, is_root: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's policy of the root, or of a wrapped module outside of `own_dtype_classes`."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            output_dtype=self.output_dtype if is_root else None,
            cast_forward_inputs=self.casts_root_inputs if is_root else self.casts_module_inputs,
        )


def read_mixed_precision(given: Any) -> PrecisionDtypes | None:
    """Return the dtypes of the argument `mixed_precision`, valid for `check_mixed_precision`, or None."""
    if isinstance(given, MixedPrecision):
        return PrecisionDtypes(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            buffer_dtype=given.buffer_dtype,
            casts_root_inputs=given.cast_root_forward_inputs,
            casts_module_inputs=given.cast_forward_inputs,
            own_dtype_classes=tuple(given._module_classes_to_ignore),
        )
    if isinstance(given, MixedPrecisionPolicy):
        return PrecisionDtypes(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            output_dtype=given.output_dtype,
            casts_root_inputs=given.cast_forward_inputs,
            casts_module_inputs=given.cast_forward_inputs,
        )
    return None


def check_mixed_precision(given: Any) -> None:
    """Validate the argument `mixed_precision`.

    Raises:
        ConfigError: It is invalid.
    """
    if given is None:
        return
    if isinstance(given, (str, BoosterPrecision)):
        raise ConfigError(
            f"mixed_precision={given!r} is an argument of the Booster, not of this plugin: write"
            " Booster(plugin=..., mixed_precision=...), or give the plugin torch's MixedPrecisionPolicy"
        )
    if not isinstance(given, (MixedPrecision, MixedPrecisionPolicy)):
        raise ConfigError(
            f"mixed_precision={given!r} is not supported: give MixedPrecisionPolicy or MixedPrecision of"
            " torch.distributed.fsdp, or write Booster(plugin=..., mixed_precision='bf16')"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        dtype = getattr(given, name, None)
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(
                f"mixed_precision with {name}={dtype!r}: FSDP casts to this dtype and computes or reduces in it, so it"
                f" must be one of {', '.join(map(str, _DTYPES))}; for float8 write Booster(..., mixed_precision='fp8')"
            )
    for name in ("cast_forward_inputs", "cast_root_forward_inputs"):
        check_flag(f"mixed_precision.{name}", getattr(given, name, True))
    if isinstance(given, MixedPrecision):
        _check_fsdp1(given)


def _check_fsdp1(given: MixedPrecision) -> None:
    if given.keep_low_precision_grads is not False:
        raise ConfigError(
            f"mixed_precision with keep_low_precision_grads={given.keep_low_precision_grads!r}: FSDP2 casts gradients"
            " to the dtype of the shards: leave it out"
        )
    classes = given._module_classes_to_ignore
    if not isinstance(classes, (tuple, list)) or not all(is_module_class(one) for one in classes):
        raise ConfigError(
            f"mixed_precision with _module_classes_to_ignore={classes!r}: give a tuple of classes of modules, () for"
            " none"
        )


def is_module_class(given: Any) -> bool:
    """Return whether `given` is an `nn.Module` class."""
    return isinstance(given, type) and issubclass(given, nn.Module)
