"""All-gather of a region's sharded tokens, fused with the matmuls of the layers that read them.

One autograd node gathers the input and multiplies it with the weights of all layers, so that in backward it receives
all their gradients together. It computes the gradient of the input and starts its reduce-scatter; the weight gradients
are computed meanwhile, by the nodes of Note [Async gradient all-reduce]. In the mode "ring" the all-gather and the
reduce-scatter are chunked and overlapped with the matmuls; see Note [Collective matmul].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.core.opaque_operator import opaque

from .async_grad_reduce import OverlappedWeight, PendingAllReduce, WGradOperands, wait_in_backward
from .collective_matmul import ChunkRange, TokenChunks, is_chunked
from .deferred_wgrad import needs_cast, weight_gradient_operands
from .group import TensorParallelGroup, group_of_number
from .linear import is_plain_linear, is_transposed
from .mappings import (
    all_gather_shards,
    all_gather_uneven,
    reduce_scatter_shards,
    shared_copy_to_tp_region,
    start_reduce_scatter_uneven,
)


class GatheredRegionInput:
    """Hook that all-gathers the tokens of all ranks at the input of a parallel region.

    Args:
        tp_group: The tensor-parallel group.
        layers: The column-parallel layers that read the region's input.
        others: Positions and names of the region's arguments that these layers read: unsharded states; optional.
    """

    def __init__(
        self, tp_group: TensorParallelGroup, layers: Sequence[nn.Module], *, others: Collection[str | int] = ()
    ) -> None:
        self._tp_group = tp_group
        self._layers = layers
        self._others = others

    def attach(self, region: nn.Module) -> None:
        """Gather a module's first argument, or `hidden_states`. Collective: no; the module's calls are."""
        region.register_forward_pre_hook(self._enter, with_kwargs=True)
        region.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        is_traced = torch.compiler.is_compiling() and self._tp_group.is_traceable(module.training)
        gather = self._traced_gather if is_traced else self._gather
        hidden = args[0] if args else kwargs["hidden_states"]
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        full = gather(hidden)
        for key, one in named.items():
            if one is hidden:  # also as keys and values
                named[key] = full
            elif isinstance(one, torch.Tensor) and key in self._others:
                named[key] = shared_copy_to_tp_region(one, self._tp_group)
        return tuple(named.pop(position) for position in range(len(args))), named

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (torch.compiler.is_compiling() and self._tp_group.is_traceable(module.training)):
            self._discard(args[0] if args else kwargs["hidden_states"])

    @not_compiled
    def _discard(self, hidden: torch.Tensor) -> None:
        self._tp_group.precomputed.discard(hidden)

    def _traced_gather(self, hidden: torch.Tensor) -> torch.Tensor:
        tp_group, (sizes, dim) = self._tp_group, self._tokens(hidden)
        layers = self._multiplied(hidden) if is_chunked(hidden, tp_group, dim) else []
        if not layers:
            return all_gather_shards(hidden, tp_group, sizes, dim)
        operands: list[Any] = []
        for layer in layers:
            operands += [hasattr(layer, "nf"), layer.weight, layer.bias]  # of transformers' Conv1D
        full, *products = _traced_all_gather_matmul(tp_group.number, dim, *sizes, hidden, *operands)
        tp_group.traced_input = full
        tp_group.traced_products = tuple(zip(layers, products, strict=True))
        return full  # type: ignore[no-any-return]

    def _multiplied(self, hidden: torch.Tensor) -> list[nn.Module]:
        """Return the layers whose outputs are computed together with the gathered input."""
        layers = [layer for layer in self._layers if is_plain_linear(layer)]
        return [layer for layer in layers if not needs_cast(hidden, layer.weight)]  # type: ignore[arg-type]

    @not_compiled
    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._tp_group.size == 1:
            return hidden
        layers, (sizes, dim) = self._multiplied(hidden), self._tokens(hidden)
        if not layers:
            return all_gather_shards(hidden, self._tp_group, sizes, dim)
        return _GatherGeometry(self._tp_group, dim, tuple(sizes)).all_gather_matmul(hidden, layers)

    def _tokens(self, hidden: torch.Tensor) -> tuple[list[int], int]:
        """Return the number of tokens of each rank, and their dimension."""
        is_flat = hidden.dim() < 3
        return self._tp_group.token_sizes(is_flat=is_flat), 0 if is_flat else 1


@dataclass(frozen=True, slots=True)
class _GatherGeometry:
    """Dimension of the tokens of an all-gather, and the number of tokens of each rank."""

    tp_group: TensorParallelGroup
    dim: int
    sizes: tuple[int, ...]

    def chunks(self, x: torch.Tensor) -> TokenChunks | None:
        """Return the chunks of a tensor of local or gathered tokens, or None if it is not chunked."""
        has_chunks = max(self.sizes) > 0 and is_chunked(x, self.tp_group, self.dim)
        return TokenChunks(self.tp_group, self.sizes) if has_chunks else None

    def all_gather_matmul(self, x: torch.Tensor, modules: Sequence[nn.Module]) -> torch.Tensor:
        """Return the tokens of all ranks, and store the layers' outputs in the group's `precomputed`."""
        pending = PendingAllReduce()
        x = wait_in_backward(x, pending)
        layers = [_LinearOperands.of(module) for module in modules]
        full, *products = _AllGatherMatmul.apply(x, self, pending, layers)  # type: ignore[no-untyped-call]
        outputs = [partial(layer.output, product, full) for layer, product in zip(layers, products, strict=True)]
        self.tp_group.precomputed.put(full, dict(zip(modules, outputs, strict=True)))
        return full  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _LinearOperands:
    """Operands of a layer that reads the input."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool  # the weight is (inputs, outputs) then
    deferred: OverlappedWeight | None  # the weight's node in backward, None if it needs no gradient

    @classmethod
    def of(cls, module: nn.Module) -> _LinearOperands:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        deferred = OverlappedWeight(module) if weight.requires_grad and torch.is_grad_enabled() else None
        return cls(weight, module.bias, is_transposed(module), deferred)  # type: ignore[arg-type]

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as (outputs, inputs)."""
        return weight.t() if self.is_transposed else weight

    def output(self, product: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """Return the precomputed output as one that backpropagates to the layer's parameters."""
        weight, operands = (
            (self.weight, None) if self.deferred is None else (self.deferred.view, self.deferred.operands)
        )
        y: torch.Tensor = _PrecomputedOutput.apply(product, full, weight, self.bias, operands, self.is_transposed)  # type: ignore[no-untyped-call]
        return y


class _AllGatherMatmul(torch.autograd.Function):
    """Weights are not inputs of the node: one whose output is never used keeps `.grad` None instead of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        geometry: _GatherGeometry,
        pending: PendingAllReduce | None,
        layers: Sequence[_LinearOperands],
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.pending, ctx.layers = geometry, pending, layers
        ctx.save_for_backward(*(layer.weight for layer in layers))
        chunks = geometry.chunks(x)
        if chunks is not None:
            full, products = _chunked_all_gather_matmul(x, layers, chunks)
        else:
            full = all_gather_uneven(x, geometry.tp_group, geometry.sizes, geometry.dim)
            products = [_matmul(full, layer) for layer in layers]
        return full, *products

    @staticmethod
    def backward(
        ctx: Any, grad_full: torch.Tensor | None, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        triples = zip(grads, ctx.layers, ctx.saved_tensors, strict=True)
        terms = [(grad, layer.matrix(weight)) for grad, layer, weight in triples if grad is not None]
        if not terms and grad_full is None:
            return None, None, None, None
        geometry: _GatherGeometry = ctx.geometry
        if torch.is_grad_enabled():
            total = sum((grad @ matrix for grad, matrix in terms), 0 if grad_full is None else grad_full)
            return reduce_scatter_shards(total, geometry.tp_group, geometry.sizes, geometry.dim), None, None, None  # type: ignore[arg-type]
        grad_x, wait = _start_input_gradient(geometry, grad_full, terms)
        if ctx.pending is None or torch.is_anomaly_enabled():
            wait()  # anomaly detection reads the gradient immediately
        else:
            ctx.pending.wait = wait
        return grad_x, None, None, None


class _PrecomputedOutput(torch.autograd.Function):
    """A precomputed output, whose backward leaves the operands of the weight's gradient to the weight's node."""

    @staticmethod
    def forward(
        ctx: Any,
        product: torch.Tensor,
        full: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        operands: WGradOperands | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.mark_dirty(product)  # returned itself rather than a view, so that callers may modify it in place
        ctx.save_for_backward(full if ctx.needs_input_grad[2] else None)
        ctx.operands, ctx.is_transposed, ctx.shape = operands, is_transposed, weight.shape
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (full,) = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[2:4]
        rows = grad.flatten(0, -2)
        grad_bias = rows.sum(0) if needs_bias else None
        grad_weight = None
        if needs_weight:
            left, right = weight_gradient_operands(rows, full, ctx.is_transposed)
            computes = ctx.operands is None or torch.is_grad_enabled()
            grad_weight = left.t() @ right if computes else ctx.operands.add(left, right, ctx.shape)
        return grad, None, grad_weight, grad_bias, None, None


def _gather_and_multiply(group: int, dim: int, *rest: Any) -> Any:
    tp_group = group_of_number(group)
    geometry = _GatherGeometry(tp_group, dim, rest[: tp_group.size])
    hidden, *operands = rest[tp_group.size :]
    layers = [
        _LinearOperands(weight, bias, is_transposed, None)
        for is_transposed, weight, bias in zip(operands[::3], operands[1::3], operands[2::3], strict=True)
    ]
    full, *products = _AllGatherMatmul.apply(hidden, geometry, None, layers)  # type: ignore[no-untyped-call]
    return full, *(layer.output(product, full) for layer, product in zip(layers, products, strict=True))


def _gathered_and_multiplied(group: int, dim: int, *rest: Any) -> Any:
    num_ranks = group_of_number(group).size
    hidden, *operands = rest[num_ranks:]
    shape = list(hidden.shape)
    shape[dim] = sum(rest[:num_ranks])
    pairs = zip(operands[::3], operands[1::3], strict=True)
    outputs = [weight.shape[1 if is_transposed else 0] for is_transposed, weight in pairs]
    return tuple(hidden.new_empty((*shape[:-1], size)) for size in (shape[-1], *outputs))


# The gathered input of a region and the outputs of the layers that read it, in graphs of torch.compile. Arguments: the
# group's number, the dimension of the tokens, their number on each rank, this rank's tokens, and for each layer whether
# its weight is transposed, the weight and the bias.
_traced_all_gather_matmul = opaque(_gather_and_multiply, _gathered_and_multiplied)

_Terms = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _matmul(x: torch.Tensor, layer: _LinearOperands) -> torch.Tensor:
    """Return a new tensor, not a view as `linear` does, so that callers may modify it in place."""
    matrix = layer.matrix(layer.weight)
    y = x.new_empty((*x.shape[:-1], matrix.shape[0]))
    rows, inputs = y.flatten(0, -2), x.flatten(0, -2)
    if layer.bias is None:
        torch.mm(inputs, matrix.t(), out=rows)
    else:
        torch.addmm(layer.bias, inputs, matrix.t(), out=rows)
    return y


def _chunked_all_gather_matmul(
    x: torch.Tensor, layers: Sequence[_LinearOperands], chunks: TokenChunks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    shape = (*x.shape[:-2], chunks.num_total)
    full = x.new_empty((*shape, x.shape[-1]))
    products: list[torch.Tensor] = []
    for chunk, shards in chunks.all_gather(x):
        chunks.write(shards, chunk, full)
        for index, layer in enumerate(layers):
            product = nn.functional.linear(shards, layer.matrix(layer.weight), layer.bias)
            if index == len(products):
                products.append(x.new_empty((*shape, product.shape[-1])))
            chunks.write(product, chunk, products[index])
    return full, products


def _start_input_gradient(
    geometry: _GatherGeometry, first: torch.Tensor | None, terms: _Terms
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start the reduce-scatter of the input's gradient: `first` plus the sum of `grad @ matrix` over the terms."""
    example = terms[0][0] if first is None else first
    chunks = geometry.chunks(example)
    if chunks is None:
        total = _sum_of_matmuls(first, terms)  # a new tensor
        return start_reduce_scatter_uneven(total, geometry.tp_group, geometry.sizes, geometry.dim, overwrites=True)

    def rows(chunk: ChunkRange) -> torch.Tensor:
        cut = [(chunks.read(grad, chunk), matrix) for grad, matrix in terms]
        return _sum_of_matmuls(None if first is None else chunks.read(first, chunk), cut)

    return chunks.reduce_scatter(rows, example, example.shape[-1] if not terms else terms[0][1].shape[-1])


def _sum_of_matmuls(first: torch.Tensor | None, terms: _Terms) -> torch.Tensor:
    if not terms:
        return first.clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
    (grad, matrix), *others = terms
    total = grad @ matrix
    rows = total.flatten(0, -2)
    for grad, matrix in others:
        rows.addmm_(grad.flatten(0, -2), matrix)
    return total if first is None else total.add_(first)
