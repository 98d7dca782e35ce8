"""Backward of column-parallel layers with the input gradient's all-reduce overlapped by weight gradients.

Note [Async gradient all-reduce]
The gradient of a layer's input is all-reduced, the gradient of its weight is local. So the input gradient is computed
first, its all-reduce is started, and the weight gradient is computed meanwhile. Autograd runs ready nodes in the
reverse order of their creation. For an input that several layers share, nodes are created in the order

    Wait(x), ComputeWGrad(q), ComputeWGrad(k), ComputeWGrad(v), StartAllReduce(x)

followed by those of the matmuls. Backward first runs the matmuls, which compute input gradients only and leave the
operands of weight gradients to the ComputeWGrad nodes. Then StartAllReduce starts the all-reduce, the ComputeWGrad
nodes compute weight gradients, and Wait waits. Any other order gives the same result. If their queue is deferring, the
ComputeWGrad nodes put their operands into it. With create_graph=True everything is computed immediately by
differentiable operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.comm import start_all_reduce

from .deferred_wgrad import DeferredWGrad, deferred_wgrad, sum_of_matmuls, weight_gradient_operands
from .group import TensorParallelGroup
from .mappings import reduce_from_tp_region


class AsyncGradInput:
    """A replicated input of column-parallel layers, whose gradient is all-reduced asynchronously.

    Args:
        x: The input, equal on all ranks.
        layers: Layers known to read it.
        tp_group: The tensor-parallel group.
    """

    def __init__(self, x: torch.Tensor, layers: Sequence[nn.Module], tp_group: TensorParallelGroup) -> None:
        pending = PendingAllReduce()
        view = wait_in_backward(x, pending)
        trained = [layer for layer in layers if layer.weight.requires_grad]
        self._weights = {id(layer.weight): OverlappedWeight(layer) for layer in trained}
        self._x: torch.Tensor = _StartAllReduce.apply(view, tp_group, pending)  # type: ignore[no-untyped-call]

    def matmul(self, layer: nn.Module, *, is_transposed: bool) -> torch.Tensor:
        """Return a layer's output.

        Args:
            layer: One of the known layers, or another one.
            is_transposed: If True, the weight is (inputs, outputs).
        """
        deferred = self._weights.get(id(layer.weight)) or OverlappedWeight(layer)
        y: torch.Tensor = _OverlappedMatmul.apply(self._x, deferred.view, layer.bias, deferred.operands, is_transposed)  # type: ignore[no-untyped-call]
        return y


@dataclass(slots=True)
class PendingAllReduce:
    """All-reduce in flight between a StartAllReduce and a Wait node.

    Attributes:
        wait: Function that waits for it, or None if none is in flight.
    """

    wait: Callable[[], object] | None = None


def wait_in_backward(x: torch.Tensor, pending: PendingAllReduce) -> torch.Tensor:
    """Return a view of `x` whose backward waits for the pending communication."""
    y: torch.Tensor = _Wait.apply(x, pending)  # type: ignore[no-untyped-call]
    return y


class WGradOperands:
    """Operands of a weight's gradient: pairs of matrices that matmul nodes leave to the weight's node.

    Args:
        deferred: The weight's deferrable gradient, or None if it is computed in backward.
    """

    def __init__(self, deferred: DeferredWGrad | None) -> None:
        self._deferred = deferred
        self._backward_id = -1
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zero: torch.Tensor | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Store a pair, and return expanded zeros that pass through the graph in place of the gradient."""
        if self._backward_id != torch._C._current_graph_task_id():
            self._pairs = []  # left by another backward, which did not need the weight's gradient
        self._backward_id = torch._C._current_graph_task_id()
        self._pairs.append((left, right))
        if self._zero is None:
            self._zero = left.new_zeros(())
        return self._zero.expand(shape)

    def gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient, or the undeferred rest of it, and release the operands.

        Args:
            grad: Gradient from the graph: the zeros of `add`, or contributions of other operations.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs or self._backward_id != torch._C._current_graph_task_id():
            return grad
        # Compare storages, as tensors without values have no data pointer.
        owner = grad.untyped_storage()._cdata
        is_zero = self._zero is not None and owner == self._zero.untyped_storage()._cdata
        if self._deferred is not None and self._deferred.should_defer:
            self._deferred.put(*pairs)
            return None if is_zero else grad
        total = sum_of_matmuls(pairs, grad.shape)
        return total if is_zero else total.add_(grad)


class OverlappedWeight:
    """A weight whose gradient is computed after nodes that were created later have started their communication.

    Args:
        layer: Linear layer, whose weight needs a gradient.

    Attributes:
        operands: Operands of the gradient.
        view: View of the weight for matmuls.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.operands = WGradOperands(deferred_wgrad(layer))
        self.view: torch.Tensor = _ComputeWGrad.apply(layer.weight, self.operands)  # type: ignore[no-untyped-call]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: PendingAllReduce) -> torch.Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        finish, ctx.pending.wait = ctx.pending.wait, None
        if finish is not None:
            finish()
        return grad, None


class _StartAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: TensorParallelGroup, pending: PendingAllReduce) -> torch.Tensor:
        ctx.tp_group, ctx.pending = tp_group, pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            return reduce_from_tp_region(grad, ctx.tp_group), None, None
        # Only matmuls read the input, and nothing else references their gradients, so that they can be overwritten.
        grad = grad.contiguous()
        ctx.pending.wait = start_all_reduce(grad, ctx.tp_group.group).wait
        return grad, None, None


class _ComputeWGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, operands: WGradOperands) -> torch.Tensor:
        ctx.operands = operands
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.operands.gradient(grad), None


class _OverlappedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        operands: WGradOperands,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.operands, ctx.is_transposed, ctx.has_bias = operands, is_transposed, bias is not None
        return nn.functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ (weight.t() if ctx.is_transposed else weight)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        left, right = weight_gradient_operands(grad, x, ctx.is_transposed)
        if torch.is_grad_enabled():
            return grad_x, left.t() @ right, grad_bias, None, None
        return grad_x, ctx.operands.add(left, right, weight.shape), grad_bias, None, None
