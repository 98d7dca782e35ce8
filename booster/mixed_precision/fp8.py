"""float8 linear layers under bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.errors import ConfigError
from booster.kernels.float8 import FORWARD_DTYPE, GRADIENT_DTYPE, native_problem, quantize, scaled_matmul

from .autocast import AutocastMixedPrecision, check_no_float16_weights, device_type_of

Recipe = Literal["dynamic", "rowwise"]


class Float8Linear(nn.Linear):
    """`nn.Linear` with input, weight and output gradient in float8, scaled by what they hold.

    The weight keeps its dtype and is quantized in every forward. Output and input gradient have the dtype that
    `nn.Linear` returns: autocast's if enabled, else the input's. The bias and its gradient are not quantized.

    Attributes:
        emulate: As in `booster.kernels.float8.scaled_matmul`.
        recipe: As in `FP8MixedPrecision`.
    """

    emulate: bool | None = None
    recipe: Recipe = "dynamic"

    @classmethod
    def convert_(cls, linear: nn.Linear, emulate: bool | None, recipe: Recipe = "dynamic") -> None:
        """Convert a linear layer in place; aliases, hooks and parameters are kept.

        Args:
            linear: Layer whose type is exactly `nn.Linear` or `Float8Linear`.
            emulate: As in `booster.kernels.float8.scaled_matmul`.
            recipe: As in `FP8MixedPrecision`.
        """
        # A new module would have to be set in every parent that shares the layer, and a model that is itself a linear
        # layer has no parent.
        linear.__class__ = cls
        linear.emulate = emulate  # type: ignore[assignment]
        linear.recipe = recipe  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input @ weight.T + bias`.

        Args:
            input: Floating-point tensor of shape (..., in_features).
        """
        kind = input.device.type
        out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        by_rows = self.recipe == "rowwise"
        result: torch.Tensor = _Float8Matmul.apply(input, self.weight, self.bias, out_dtype, self.emulate, by_rows)
        return result


# Shapes: M rows of the input (leading dimensions flattened), K in_features, N out_features; _q is quantized.
# By rows, a scale belongs to the numbers that one element of the product sums over. The backward sums over the other
# dimension of input and weight than the forward, and over both of the gradient: each is quantized twice.
# Sums of the forward may be kept in the hardware's short format, those of gradients not, as in Transformer Engine.
class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight_NK: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        emulate: bool | None,
        by_rows: bool,
    ) -> torch.Tensor:
        input_MK, summed_dim = input.reshape(-1, input.shape[-1]), 1 if by_rows else None
        input_q, scale_input = quantize(input_MK, FORWARD_DTYPE, summed_dim)
        weight_q, scale_weight = quantize(weight_NK, FORWARD_DTYPE, summed_dim)
        output_MN = scaled_matmul(
            input_q, weight_q.t(), scale_input, scale_weight.t(), out_dtype, emulate=emulate, fast_accumulation=True
        )
        if by_rows and ctx.needs_input_grad[1]:
            input_q, scale_input = quantize(input_MK, FORWARD_DTYPE, 0)
        if by_rows and ctx.needs_input_grad[0]:
            weight_q, scale_weight = quantize(weight_NK, FORWARD_DTYPE, 0)
        ctx.save_for_backward(input_q, scale_input, weight_q, scale_weight)
        ctx.by_rows = by_rows
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weight_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.emulate = emulate
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
        dtype, summed_dim = (FORWARD_DTYPE, 1) if ctx.by_rows else (GRADIENT_DTYPE, None)
        if needs_input or (needs_weight and not ctx.by_rows):
            grad_q, scale_grad = quantize(grad_MN, dtype, summed_dim)
        if needs_input:
            grad_MK = scaled_matmul(grad_q, weight_q, scale_grad, scale_weight, ctx.input_dtype, emulate=ctx.emulate)
            grad_input = grad_MK.reshape(ctx.input_shape)
        if needs_weight:
            if ctx.by_rows:
                grad_q, scale_grad = quantize(grad_MN, dtype, 0)
            grad_weight = scaled_matmul(
                grad_q.t(), input_q, scale_grad.t(), scale_input, ctx.weight_dtype, emulate=ctx.emulate
            )
        if needs_bias:
            grad_bias = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


ModuleFilter = Callable[[str, nn.Module], bool]


class FP8MixedPrecision(AutocastMixedPrecision):
    """float8 matrix multiplications in linear layers, bfloat16 autocast on fp32 weights elsewhere.

    Scales are computed from the numbers that are multiplied, without amax history, and there is no loss scaling. Output
    layers are often excluded: `module_filter=lambda name, module: name != "lm_head"`.

    Args:
        recipe: "dynamic" has one scale for each tensor, with e4m3 in forward and e5m2 for gradients. "rowwise" has one
            for each row of input, weight and gradient, along the dimension that is summed over, and e4m3 for all: large
            values cost other rows no precision, and each tensor is quantized twice. On accelerators the products of
            "rowwise" are rounded to bfloat16, also the gradients of fp32 weights.
        module_filter: Callable with the name and module of every `nn.Linear` that returns whether to convert it;
            optional, defaults to all. Subclasses of `nn.Linear` are never converted, as their forward may differ.
        emulate: If True, multiply the quantized values in fp32. If False, require float8 instructions. Optional,
            defaults to float8 instructions if available. See `booster.kernels.float8.scaled_matmul`.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self, recipe: Recipe = "dynamic", module_filter: ModuleFilter | None = None, emulate: bool | None = None
    ) -> None:
        super().__init__(torch.bfloat16)
        if recipe not in get_args(Recipe):
            raise ConfigError(
                f"recipe={recipe!r} is not known: pass 'dynamic' (a scale for each tensor) or 'rowwise' (for each row)"
            )
        if module_filter is not None and not callable(module_filter):
            raise ConfigError(
                f"module_filter={module_filter!r} is not callable: pass a function of (name, module) that returns"
                " whether to convert the layer"
            )
        if emulate is not None and not isinstance(emulate, bool):
            raise ConfigError(f"emulate={emulate!r} is not a bool or None: pass True, False, or None to detect support")
        self._module_filter = module_filter
        self._emulate = emulate
        self._recipe: Recipe = recipe

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of the linear layers' matrix multiplications."""
        return FORWARD_DTYPE

    def config_fingerprint(self) -> list[str]:
        return [*super().config_fingerprint(), f"recipe={self._recipe}"]

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
            Float8Linear.convert_(linear, self._emulate, self._recipe)

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
            _check_native(device_type_of(model), by_rows=self._recipe == "rowwise")
        return super().configure(model, optimizer, criterion)


def _check_native(device_type: str, *, by_rows: bool) -> None:
    lefts = (FORWARD_DTYPE,) if by_rows else (FORWARD_DTYPE, GRADIENT_DTYPE)
    found = [native_problem(device_type, left, FORWARD_DTYPE, by_rows=by_rows) for left in lefts]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise ConfigError(
            f"emulate=False, but {device_type!r} has no float8 matrix multiplication ({problems[0]}): pass emulate=None"
            " or True, which multiplies the same quantized values in fp32"
        )
