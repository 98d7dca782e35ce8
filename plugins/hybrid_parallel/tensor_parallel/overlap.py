"""Backward of column-parallel layers in which the sum over the ranks goes on while weight gradients are computed.

Note [Overlapped backward]
The gradient of a layer's input has to be summed over the ranks, that of its weight stays where it is. So the first is
computed first, its sum is started, and the second is computed meanwhile. Autograd runs what is ready in the opposite
order of creation, which is put to use: for an input that several layers share, nodes are created in the order

    Wait(x), Deferred(weight of q), Deferred(weight of k), Deferred(weight of v), Communicate(x)

and after them those of the products. Backward comes through the products, which compute gradients of the input only and
leave to the Deferred nodes what these need; then through Communicate, which starts the sum; then through the Deferred
nodes; and last through Wait. Any other order gives the same numbers. Where the gradients of weights
are computed later still, see Note [Later gradients], the Deferred nodes hand on what they got. Where the graph of
backward itself is asked for, everything is computed at once and by differentiable operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from booster.comm import start_all_reduce
from booster.plugins.hybrid_parallel.tensor_parallel.later_gradients import (
    LaterGradient,
    later_gradient,
    sum_of_products,
)
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import sum_over_ranks

__all__ = ["DeferredWeight", "OverlappedInput", "Pending", "Stash", "awaited", "can_overlap", "cast_between"]


def can_overlap(x: torch.Tensor, weight: torch.Tensor, ranks: TensorParallelRanks) -> bool:
    """Returns whether a product can have its backward overlapped: both have gradients, and nobody casts them."""
    needs_both = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    return ranks.size > 1 and needs_both and not cast_between(x, weight) and x.dim() > 1


def cast_between(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether a product of both needs one of them in another format, or autocast may choose one."""
    return torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype


class OverlappedInput:
    """An input of column-parallel layers, and what of their weights takes part in its backward.

    Args:
        x: The same on all ranks.
        layers: That will read it, as far as known.
        ranks: Who sum its gradient.
    """

    def __init__(self, x: torch.Tensor, layers: Sequence[nn.Module], ranks: TensorParallelRanks) -> None:
        pending = Pending()
        waited = awaited(x, pending)
        trained = [layer for layer in layers if layer.weight.requires_grad]
        self._weights = {id(layer.weight): DeferredWeight.of(layer) for layer in trained}
        self._x: torch.Tensor = _Communicate.apply(waited, ranks, pending)  # type: ignore[no-untyped-call]

    def product(self, layer: nn.Module, *, is_transposed: bool) -> torch.Tensor:
        """Returns the product with the weight of a layer, and its bias.

        Args:
            layer: Known or not.
            is_transposed: The weight is (inputs, outputs).
        """
        deferred = self._weights.get(id(layer.weight)) or DeferredWeight.of(layer)
        y: torch.Tensor = _Product.apply(self._x, deferred.view, layer.bias, deferred.stash, is_transposed)  # type: ignore[no-untyped-call]
        return y


class Pending:
    """What Communicate has started and Wait finishes: the gradient is there after that.

    Attributes:
        finish: None: nothing is under way.
    """

    def __init__(self) -> None:
        self.finish: Callable[[], object] | None = None


def awaited(x: torch.Tensor, pending: Pending) -> torch.Tensor:
    """Returns a tensor in whose backward is finished what is pending."""
    y: torch.Tensor = _Wait.apply(x, pending)  # type: ignore[no-untyped-call]
    return y


class Stash:
    """What products leave to the node of their weight: pairs of matrices whose product is its gradient.

    Args:
        later: How the gradient is left for later; None: it is not.
    """

    def __init__(self, later: LaterGradient | None = None) -> None:
        self._later = later
        self._backward_id = -1
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zero: torch.Tensor | None = None

    def put(self, left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Keeps a pair, and returns zeros that go through the graph in the place of the gradient."""
        if self._backward_id != torch._C._current_graph_task_id():
            self._pairs = []  # of another backward, which did not ask for the weight's gradient
        self._backward_id = torch._C._current_graph_task_id()
        self._pairs.append((left, right))
        if self._zero is None:
            self._zero = left.new_zeros(())
        return self._zero.expand(shape)

    def gradient(self, arrived: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient, or what is not left for later of it, and lets go of what it is made of.

        Args:
            arrived: What came through the graph: zeros, or what others than products add.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs or self._backward_id != torch._C._current_graph_task_id():
            return arrived
        # By what owns the memory, as tensors without values have no address.
        owner = arrived.untyped_storage()._cdata
        is_zero = self._zero is not None and owner == self._zero.untyped_storage()._cdata
        if self._later is not None and self._later.is_asked_for:
            self._later.keep(*pairs)
            return None if is_zero else arrived
        total = sum_of_products(pairs, arrived.shape)
        return total if is_zero else total.add_(arrived)


class DeferredWeight:
    """A weight whose gradient is computed after what was created later has started.

    Args:
        weight: It has a gradient.
        later: How that is left for later; None: it is not.

    Attributes:
        stash: Where products leave what the gradient is made of.
        view: What products read in the weight's place.
    """

    def __init__(self, weight: nn.Parameter, later: LaterGradient | None) -> None:
        self.stash = Stash(later)
        self.view: torch.Tensor = _Deferred.apply(weight, self.stash)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, layer: nn.Module) -> DeferredWeight:
        """Returns a linear layer's weight."""
        return cls(layer.weight, later_gradient(layer))  # type: ignore[arg-type]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        finish, ctx.pending.finish = ctx.pending.finish, None
        if finish is not None:
            finish()
        return grad, None


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, pending: Pending) -> torch.Tensor:
        ctx.ranks, ctx.pending = ranks, pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            return sum_over_ranks(grad, ctx.ranks), None, None
        # Products are all that read the input, and nothing else holds the gradients that they make.
        grad = grad.contiguous()
        ctx.pending.finish = start_all_reduce(grad, ctx.ranks.group).wait
        return grad, None, None


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, stash: Stash) -> torch.Tensor:
        ctx.stash = stash
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.stash.gradient(grad), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stash: Stash,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stash, ctx.is_transposed, ctx.has_bias = stash, is_transposed, bias is not None
        return nn.functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ (weight.t() if ctx.is_transposed else weight)
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        inputs = x.reshape(-1, x.shape[-1])
        left, right = (inputs, rows) if ctx.is_transposed else (rows, inputs)
        if torch.is_grad_enabled():
            return grad_x, left.t() @ right, grad_bias, None, None
        return grad_x, ctx.stash.put(left, right, weight.shape), grad_bias, None, None
