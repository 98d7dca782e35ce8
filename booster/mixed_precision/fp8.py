"""float8 linear layers under bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.errors import ConfigError
from booster.kernels.float8 import FORWARD_DTYPE, GRADIENT_DTYPE, native_problem, quantize, scaled_matmul

from .autocast import AutocastMixedPrecision, check_no_float16_weights, device_type_of


class Float8Linear(nn.Linear):
    """`nn.Linear` with input and weight in e4m3 and the output gradient in e5m2, with dynamic per-tensor scaling.

    The weight keeps its dtype and is quantized in every forward. Output and input gradient have the dtype that
    `nn.Linear` returns: autocast's if enabled, else the input's. The bias and its gradient are not quantized.

    Attributes:
        emulate: As in `booster.kernels.float8.scaled_matmul`.
    """

    emulate: bool | None = None

    @classmethod
    def convert_(cls, linear: nn.Linear, emulate: bool | None) -> None:
        """Convert a linear layer in place; aliases, hooks and parameters are kept.

        Args:
            linear: Layer whose type is exactly `nn.Linear` or `Float8Linear`.
            emulate: As in `booster.kernels.float8.scaled_matmul`.
        """
        # A new module would have to be set in every parent that shares the layer, and a model that is itself a linear
        # layer has no parent.
        linear.__class__ = cls
        linear.emulate = emulate  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input @ weight.T + bias`.

        Args:
            input: Floating-point tensor of shape (..., in_features).
        """
        kind = input.device.type
        out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        result: torch.Tensor = _Float8Matmul.apply(input, self.weight, self.bias, out_dtype, self.emulate)
        return result


# Shapes: M rows of the input (leading dimensions flattened), K in_features, N out_features; _q is quantized.
class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight_NK: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        emulate: bool | None,
    ) -> torch.Tensor:
        input_q, scale_input = quantize(input.reshape(-1, input.shape[-1]), FORWARD_DTYPE)
        weight_q, scale_weight = quantize(weight_NK, FORWARD_DTYPE)
        ctx.save_for_backward(input_q, scale_input, weight_q, scale_weight)
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weight_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.emulate = emulate
        output_MN = scaled_matmul(input_q, weight_q.t(), scale_input, scale_weight, out_dtype, emulate=emulate)
        if bias is not None:
            output_MN = output_MN + bias.to(out_dtype)
        return output_MN.reshape(*input.shape[:-1], weight_NK.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_q, scale_input, weight_q, scale_weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_MN = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needs_input or needs_weight:
            grad_q, scale_grad = quantize(grad_MN, GRADIENT_DTYPE)
        if needs_input:
            grad_MK = scaled_matmul(grad_q, weight_q, scale_grad, scale_weight, ctx.input_dtype, emulate=ctx.emulate)
            grad_input = grad_MK.reshape(ctx.input_shape)
        if needs_weight:
            grad_weight = scaled_matmul(
                grad_q.t(), input_q, scale_grad, scale_input, ctx.weight_dtype, emulate=ctx.emulate
            )
        if needs_bias:
            grad_bias = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


ModuleFilter = Callable[[str, nn.Module], bool]


class FP8MixedPrecision(AutocastMixedPrecision):
    """float8 matrix multiplications in linear layers, bfloat16 autocast on fp32 weights elsewhere.

    e4m3 in forward, e5m2 for gradients, with dynamic per-tensor scaling and no loss scaling. Output layers are often
    excluded: `module_filter=lambda name, module: name != "lm_head"`.

    Args:
        recipe: Scaling recipe, only "dynamic": scales are computed from the current tensor, without amax history.
        module_filter: Callable with the name and module of every `nn.Linear` that returns whether to convert it;
            optional, defaults to all. Subclasses of `nn.Linear` are never converted, as their forward may differ.
        emulate: If True, multiply the quantized values in fp32. If False, require float8 instructions. Optional,
            defaults to float8 instructions if available. See `booster.kernels.float8.scaled_matmul`.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self, recipe: str = "dynamic", module_filter: ModuleFilter | None = None, emulate: bool | None = None
    ) -> None:
        super().__init__(torch.bfloat16)
        if recipe != "dynamic":
            raise ConfigError(f"recipe={recipe!r} is not known: pass 'dynamic' (scale computed from the tensor)")
        if module_filter is not None and not callable(module_filter):
            raise ConfigError(
                f"module_filter={module_filter!r} is not callable: pass a function of (name, module) that returns"
                " whether to convert the layer"
            )
        if emulate is not None and not isinstance(emulate, bool):
            raise ConfigError(f"emulate={emulate!r} is not a bool or None: pass True, False, or None to detect support")
        self._module_filter = module_filter
        self._emulate = emulate

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of the linear layers' matrix multiplications."""
        return FORWARD_DTYPE

    def prepare(self, model: nn.Module) -> None:
        """Convert the selected linear layers to `Float8Linear` in place; parameters, hooks and aliases are kept.

        Args:
            model: User's model.

        Raises:
            ConfigError: No layer is selected, or a trainable parameter is float16.
        """
        check_no_float16_weights(model, "fp8")
        selected = [
            module
            for name, module in model.named_modules()
            if type(module) in (nn.Linear, Float8Linear)
            and (self._module_filter is None or self._module_filter(name, module))
        ]
        if not selected:
            cause = "it has no nn.Linear" if self._module_filter is None else "module_filter selected no nn.Linear"
            raise ConfigError(
                f"mixed_precision='fp8' has no effect on this {type(model).__name__}: {cause}. Select layers with"
                " FP8MixedPrecision(module_filter=...), or use 'bf16'"
            )
        for linear in selected:
            Float8Linear.convert_(linear, self._emulate)

    def configure(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        criterion: Callable[..., Any] | None,
        prepared: Any = None,
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Install autocast and wrap the criterion; return model, optimizer and criterion.

        Raises:
            ConfigError: `emulate=False` on a device without float8 instructions.
        """
        if self._emulate is False:
            _check_native(device_type_of(model))
        return super().configure(model, optimizer, criterion)


def _check_native(device_type: str) -> None:
    pairs = ((FORWARD_DTYPE, FORWARD_DTYPE), (GRADIENT_DTYPE, FORWARD_DTYPE))
    problems = [problem for pair in pairs if (problem := native_problem(device_type, *pair)) is not None]
    if problems:
        raise ConfigError(
            f"emulate=False, but {device_type!r} has no float8 matrix multiplication ({problems[0]}): pass emulate=None"
            " or True, which multiplies the same quantized values in fp32"
        )
