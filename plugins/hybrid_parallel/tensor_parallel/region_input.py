"""All-gather of a region's sharded tokens, fused with the matmuls of the layers that read them.

One autograd node gathers the input and multiplies it with the weights of all layers, so that in backward it receives
all their gradients together. It computes the gradient of the input and starts its reduce-scatter; the weight gradients
are computed meanwhile, by the nodes of Note [Overlapped backward]. In the mode "ring" the all-gather and the
reduce-scatter are chunked and overlapped with the matmuls; see Note [Chunks].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.chunks import Chunks, Span, runs_in_chunks
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_plain_linear, is_transposed
from booster.plugins.hybrid_parallel.tensor_parallel.overlap import (
    DeferredWeight,
    Pending,
    Stash,
    awaited,
    cast_between,
)
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import (
    gather_parts,
    gathered,
    scatter_sum,
    sizes_of_own,
    start_summed_part,
)
from booster.plugins.hybrid_parallel.tensor_parallel.ring_row import weight_gradient
from booster.plugins.sharding.compiling import not_compiled

__all__ = ["RegionInput"]


class RegionInput:
    """Hook that all-gathers the tokens of all ranks at the input of a parallel region.

    Args:
        ranks: The tensor-parallel group.
        layers: The column-parallel layers that read the region's input.
    """

    def __init__(self, ranks: TensorParallelRanks, layers: Sequence[nn.Module]) -> None:
        self._ranks = ranks
        self._layers = layers

    def attach(self, region: nn.Module) -> None:
        """Gather a module's first argument, or `hidden_states`. Collective: no; the module's calls are."""
        region.register_forward_pre_hook(self._enter, with_kwargs=True)
        region.register_forward_hook(self._leave, with_kwargs=True)

    @not_compiled
    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._gathered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gathered(kwargs["hidden_states"])}

    @not_compiled
    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._ranks.products.forget(args[0] if args else kwargs["hidden_states"])

    def _gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        ranks, dim = self._ranks, 1 if hidden.dim() > 2 else 0
        if ranks.size == 1:
            return hidden
        way = _Way(ranks, dim, tuple(sizes_of_own(hidden.shape[dim], ranks, None)))
        layers = [layer for layer in self._layers if is_plain_linear(layer)]
        layers = [layer for layer in layers if not cast_between(hidden, layer.weight)]  # type: ignore[arg-type]
        return way.multiplied(hidden, layers) if layers else gather_parts(hidden, ranks, dim, way.sizes)


@dataclass(frozen=True, slots=True)
class _Way:
    """Geometry of an all-gather.

    Attributes:
        ranks: The tensor-parallel group.
        dim: Dimension of the tokens.
        sizes: Number of tokens of each rank.
    """

    ranks: TensorParallelRanks
    dim: int
    sizes: tuple[int, ...]

    def chunks(self, x: torch.Tensor) -> Chunks | None:
        """Return the chunks of a tensor of local or gathered tokens, or None if it is not chunked."""
        return Chunks(self.ranks, self.sizes) if runs_in_chunks(x, self.ranks, self.dim, self.sizes) else None

    def multiplied(self, x: torch.Tensor, modules: Sequence[nn.Module]) -> torch.Tensor:
        """Return the tokens of all ranks, and store the layers' outputs in the group's `products`."""
        pending = Pending()
        x = awaited(x, pending)
        layers = [_Layer.of(module) for module in modules]
        whole, *products = _GatherAndMultiply.apply(x, self, pending, layers)  # type: ignore[no-untyped-call]
        taken = [partial(layer.taken, product, whole) for layer, product in zip(layers, products, strict=True)]
        self.ranks.products.keep(whole, dict(zip(modules, taken, strict=True)))
        return whole  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Operands of a layer that reads the input.

    Attributes:
        weight: The weight.
        bias: The bias, or None.
        is_transposed: If True, the weight is (inputs, outputs), otherwise (outputs, inputs).
        deferred: The weight's node in backward, or None if it needs no gradient.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool
    deferred: DeferredWeight | None

    @classmethod
    def of(cls, module: nn.Module) -> _Layer:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        deferred = DeferredWeight.of(module) if weight.requires_grad and torch.is_grad_enabled() else None
        return cls(weight, module.bias, is_transposed(module), deferred)  # type: ignore[arg-type]

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as (outputs, inputs)."""
        return weight.t() if self.is_transposed else weight

    def taken(self, product: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return the precomputed output as one that backpropagates to the layer's parameters."""
        weight, stash = (self.weight, None) if self.deferred is None else (self.deferred.view, self.deferred.stash)
        y: torch.Tensor = _Taken.apply(product, whole, weight, self.bias, stash, self.is_transposed)  # type: ignore[no-untyped-call]
        return y


class _GatherAndMultiply(torch.autograd.Function):
    """Weights are not inputs of the node: one whose output is never used keeps `.grad` None instead of zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, way: _Way, pending: Pending, layers: Sequence[_Layer]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.pending, ctx.layers = way, pending, layers
        ctx.save_for_backward(*(layer.weight for layer in layers))
        chunks = way.chunks(x)
        if chunks is not None:
            whole, products = _multiplied_in_chunks(x, layers, chunks)
        else:
            whole = gathered(x, way.ranks, way.dim, way.sizes)
            products = [_product(whole, layer) for layer in layers]
        return whole, *products

    @staticmethod
    def backward(
        ctx: Any, grad_whole: torch.Tensor | None, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        triples = zip(grads, ctx.layers, ctx.saved_tensors, strict=True)
        terms = [(grad, layer.matrix(weight)) for grad, layer, weight in triples if grad is not None]
        if not terms and grad_whole is None:
            return None, None, None, None
        way: _Way = ctx.way
        if torch.is_grad_enabled():
            total = sum((grad @ matrix for grad, matrix in terms), 0 if grad_whole is None else grad_whole)
            return scatter_sum(total, way.ranks, way.dim, way.sizes), None, None, None  # type: ignore[arg-type]
        grad_x, finish = _start_input_gradient(way, grad_whole, terms)
        if torch.is_anomaly_enabled():
            finish()  # anomaly detection reads the gradient immediately
        else:
            ctx.pending.finish = finish
        return grad_x, None, None, None


class _Taken(torch.autograd.Function):
    """A precomputed output, whose backward leaves the operands of the weight's gradient to the weight's node."""

    @staticmethod
    def forward(
        ctx: Any,
        product: torch.Tensor,
        whole: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stash: Stash | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.mark_dirty(product)  # returned itself rather than a view, so that callers may modify it in place
        ctx.save_for_backward(whole if ctx.needs_input_grad[2] else None)
        ctx.stash, ctx.is_transposed, ctx.shape = stash, is_transposed, weight.shape
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (whole,) = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[2:4]
        rows = grad.flatten(0, -2)
        grad_bias = rows.sum(0) if needs_bias else None
        grad_weight = None
        if needs_weight and torch.is_grad_enabled():
            grad_weight = weight_gradient(grad, whole, ctx.is_transposed)
        elif needs_weight:
            inputs = whole.flatten(0, -2)
            left, right = (inputs, rows) if ctx.is_transposed else (rows, inputs)
            grad_weight = ctx.stash.put(left, right, ctx.shape)
        return grad, None, grad_weight, grad_bias, None, None


_Terms = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _product(x: torch.Tensor, layer: _Layer) -> torch.Tensor:
    """Return a new tensor, not a view as `linear` does, so that callers may modify it in place."""
    matrix = layer.matrix(layer.weight)
    y = x.new_empty((*x.shape[:-1], matrix.shape[0]))
    rows, inputs = y.flatten(0, -2), x.flatten(0, -2)
    if layer.bias is None:
        torch.mm(inputs, matrix.t(), out=rows)
    else:
        torch.addmm(layer.bias, inputs, matrix.t(), out=rows)
    return y


def _multiplied_in_chunks(
    x: torch.Tensor, layers: Sequence[_Layer], chunks: Chunks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    shape = (*x.shape[:-2], chunks.num_whole)
    whole = x.new_empty((*shape, x.shape[-1]))
    products: list[torch.Tensor] = []
    for span, pieces in chunks.gathered(x):
        chunks.put(pieces, span, whole)
        for index, layer in enumerate(layers):
            product = nn.functional.linear(pieces, layer.matrix(layer.weight), layer.bias)
            if index == len(products):
                products.append(x.new_empty((*shape, product.shape[-1])))
            chunks.put(product, span, products[index])
    return whole, products


def _start_input_gradient(
    way: _Way, first: torch.Tensor | None, terms: _Terms
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start the reduce-scatter of the input's gradient: `first` plus the sum of `grad @ matrix` over the terms."""
    example = terms[0][0] if first is None else first
    chunks = way.chunks(example)
    if chunks is None:
        return start_summed_part(_sum_of_products(first, terms), way.ranks, way.dim, way.sizes)

    def rows(span: Span) -> torch.Tensor:
        cut = [(chunks.take(grad, span), matrix) for grad, matrix in terms]
        return _sum_of_products(None if first is None else chunks.take(first, span), cut)

    return chunks.start_sum(rows, example, example.shape[-1] if not terms else terms[0][1].shape[-1])


def _sum_of_products(first: torch.Tensor | None, terms: _Terms) -> torch.Tensor:
    if not terms:
        return first.clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
    (grad, matrix), *others = terms
    total = grad @ matrix
    rows = total.flatten(0, -2)
    for grad, matrix in others:
        rows.addmm_(grad.flatten(0, -2), matrix)
    return total if first is None else total.add_(first)
