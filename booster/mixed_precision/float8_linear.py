"""A linear layer whose three matrix multiplications take float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.kernels.float8 import FORWARD_DTYPE, GRADIENT_DTYPE, quantize, scaled_matmul

__all__ = ["Float8Linear"]


class Float8Linear(nn.Linear):
    """`nn.Linear` with input and weight in e4m3 and the output's gradient in e5m2, one dynamic scale per tensor.

    The weight stays in its own format and is quantised anew in every forward. Output and input gradient have the format
    that `nn.Linear` would give them: autocast's where it is on, else the input's. The bias and its gradient are not
    quantised.

    Attributes:
        emulate: As in `booster.kernels.float8.scaled_matmul`.
    """

    emulate: bool | None = None

    @classmethod
    def convert_(cls, linear: nn.Linear, emulate: bool | None) -> None:
        """Makes a plain linear layer one of these, in place: aliases, hooks and parameters stay.

        Args:
            linear: A layer whose type is exactly `nn.Linear`, or one of these.
            emulate: As in `booster.kernels.float8.scaled_matmul`.
        """
        # No new module: it would have to be put into every parent that shares the old one, and a model that is itself
        # a linear layer has no parent.
        linear.__class__ = cls
        linear.emulate = emulate  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns `input @ weight.T + bias`.

        Args:
            input: (..., in_features), floating.
        """
        kind = input.device.type
        out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        result: torch.Tensor = _Float8Matmul.apply(input, self.weight, self.bias, out_dtype, self.emulate)
        return result


# Shapes: M rows of the input (all leading dimensions together), K in_features, N out_features; _q is quantised.
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
