"""float8 linear layers inside of a bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.kernels.float8 import FORWARD_DTYPE, GRADIENT_DTYPE, native_problem
from booster.mixed_precision.autocast import AutocastMixedPrecision, device_type_of, refuse_float16_weights
from booster.mixed_precision.float8_linear import Float8Linear

__all__ = ["FP8MixedPrecision"]

ModuleFilter = Callable[[str, nn.Module], bool]


class FP8MixedPrecision(AutocastMixedPrecision):
    """Linear layers multiply in float8; everything else runs under bfloat16 autocast on fp32 weights.

    Forward e4m3, gradients e5m2, each tensor with a scale from its own largest value at that moment; no loss scaling.
    Output layers are often kept out: `module_filter=lambda name, module: name != "lm_head"`.

    Args:
        recipe: Only "dynamic": scales come from the tensor itself, with no history.
        module_filter: Called with the name and the module of every `nn.Linear`; True takes it. None takes all. Modules
            of subclasses of `nn.Linear` are never taken: their forward may differ.
        emulate: True multiplies the quantised values in fp32; False demands the device's float8 instructions; None
            takes them where an accelerator has them. See `booster.kernels.float8.scaled_matmul`.

    Raises:
        ConfigError: An argument of the wrong kind.
    """

    def __init__(
        self, recipe: str = "dynamic", module_filter: ModuleFilter | None = None, emulate: bool | None = None
    ) -> None:
        super().__init__(torch.bfloat16)
        if recipe != "dynamic":
            raise ConfigError(f"recipe={recipe!r} is not known: pass 'dynamic', which takes each scale from the tensor")
        if module_filter is not None and not callable(module_filter):
            raise ConfigError(
                f"module_filter={module_filter!r} can't be called: pass a function of (name, module) that returns"
                " whether the layer multiplies in float8"
            )
        if emulate is not None and not isinstance(emulate, bool):
            raise ConfigError(f"emulate={emulate!r} is no choice: pass True, False, or None for what the device has")
        self._module_filter = module_filter
        self._emulate = emulate

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the linear layers' matrix multiplications."""
        return FORWARD_DTYPE

    def prepare(self, model: nn.Module) -> None:
        """Turns the chosen linear layers into `Float8Linear`, in place; parameters, hooks and aliases stay.

        Args:
            model: The user's model.

        Raises:
            ConfigError: No layer was chosen, or a trainable parameter is float16.
        """
        refuse_float16_weights(model, "fp8")
        chosen = [module for name, module in model.named_modules() if self._is_chosen(name, module)]
        if not chosen:
            cause = "it has no nn.Linear" if self._module_filter is None else "module_filter took no nn.Linear"
            raise ConfigError(
                f"mixed_precision='fp8' would change nothing in this {type(model).__name__}: {cause}. Choose layers"
                " with FP8MixedPrecision(module_filter=...), or use 'bf16'"
            )
        for linear in chosen:
            Float8Linear.convert_(linear, self._emulate)

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the model its context and wraps the criterion; returns the three.

        Raises:
            ConfigError: `emulate=False` on a device without float8 instructions.
        """
        if self._emulate is False:
            _demand_native(device_type_of(model))
        return super().configure(model, optimizer, criterion)

    def _is_chosen(self, name: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear and type(module) is not Float8Linear:
            return False
        return self._module_filter is None or bool(self._module_filter(name, module))


def _demand_native(device_type: str) -> None:
    pairs = ((FORWARD_DTYPE, FORWARD_DTYPE), (GRADIENT_DTYPE, FORWARD_DTYPE))
    problems = [problem for pair in pairs if (problem := native_problem(device_type, *pair)) is not None]
    if problems:
        raise ConfigError(
            f"emulate=False, but {device_type!r} can't multiply float8 ({problems[0]}): pass emulate=None or True,"
            " which gives the same quantised values at the cost of fp32 multiplications"
        )
