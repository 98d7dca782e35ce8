"""Mappings of tensor-parallel regions in the graphs of torch.compile: those of `mappings`.

Collectives are operators of their own, such as `booster::tp_all_reduce`, which the compiler does not look into. They
take the number of a group, as operators take no objects, and their results are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from booster.comm import start_all_reduce
from booster.core.opaque_operator import opaque

from .group import TensorParallelGroup, group_of_number
from .mappings import (
    all_gather_uneven,
    copy_to_tp_region,
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_uneven,
    scatter_to_tp_region,
    sizes_from_full,
    sizes_from_local,
)


def traced_copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `shared_copy_to_tp_region(x)`: consecutive layers with the same input share one copy of it.

    Collective: in backward.
    """
    if not torch.is_grad_enabled():
        return x
    if tp_group.traced_input is not x:
        tp_group.traced_input, tp_group.traced_copy = x, _Copy.apply(x, tp_group.number)  # type: ignore[no-untyped-call]
    return tp_group.traced_copy  # type: ignore[return-value]


def traced_reduce_from_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `reduce_from_tp_region(x)`. Collective: yes."""
    tp_group.end_traced_region()
    return _AllReduce.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]


def traceable_copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `copy_to_tp_region(x)`, also in a graph. Collective: in backward."""
    if torch.compiler.is_compiling() and tp_group.size > 1 and x.requires_grad:
        return _Copy.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]
    return copy_to_tp_region(x, tp_group)


def traceable_reduce_from_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `reduce_from_tp_region(x)`, also in a graph. Collective: yes."""
    if torch.compiler.is_compiling() and tp_group.size > 1:
        return _AllReduce.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]
    return reduce_from_tp_region(x, tp_group)


def traced_all_gather_sequence(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int) -> torch.Tensor:
    """Return `all_gather_shards(x, dim)` over the tokens of the sequence. Collective: in forward and backward."""
    return _AllGather.apply(x, dim, tp_group.sequence_length, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]


def traced_reduce_scatter_sequence(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int) -> torch.Tensor:
    """Return `reduce_scatter_shards(x, dim)` over the tokens of the sequence. Collective: in forward and backward."""
    tp_group.end_traced_region()
    return _ReduceScatter.apply(x, dim, tp_group.sequence_length, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]


def _gather(group: int, sizes: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return gather_from_tp_region(x, group_of_number(group), sizes)


def _gathered(group: int, sizes: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(sizes)))


def _scatter(group: int, sizes: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return scatter_to_tp_region(x, group_of_number(group), sizes)


def _scattered(group: int, sizes: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sizes[group_of_number(group).rank]))


# `gather_from_tp_region` and `scatter_to_tp_region` of features. Arguments: the group's number, all ranks' numbers of
# features, and the tensor.
traced_gather_from_tp_region = opaque(_gather, _gathered)
traced_scatter_to_tp_region = opaque(_scatter, _scattered)


@torch.library.custom_op("booster::tp_all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the sum of a tensor over the group of a number. Collective: yes."""
    total = x.clone(memory_format=torch.contiguous_format)
    start_all_reduce(total, group_of_number(group).group).wait()
    return total


@all_reduce.register_fake
def _(x: torch.Tensor, group: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("booster::tp_all_gather", mutates_args=())
def all_gather(x: torch.Tensor, dim: int, length: int, group: int) -> torch.Tensor:
    """Return all ranks' tokens, along a dimension, of sequences of a length. Collective: yes."""
    tp_group = group_of_number(group)
    return all_gather_uneven(x, tp_group, dim, sizes_from_local(x.shape[dim], tp_group, length))


@all_gather.register_fake
def _(x: torch.Tensor, dim: int, length: int, group: int) -> torch.Tensor:
    sizes = sizes_from_local(x.shape[dim], group_of_number(group), length)
    return x.new_empty([sum(sizes) if index == dim else size for index, size in enumerate(x.shape)])


@torch.library.custom_op("booster::tp_reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, dim: int, length: int, group: int) -> torch.Tensor:
    """Return this rank's tokens, along a dimension, of the sum of all ranks' tensors. Collective: yes."""
    tp_group = group_of_number(group)
    sizes = sizes_from_full(x.shape[dim], tp_group, length)
    return reduce_scatter_uneven(x.contiguous(), tp_group, dim, sizes)


@reduce_scatter.register_fake
def _(x: torch.Tensor, dim: int, length: int, group: int) -> torch.Tensor:
    tp_group = group_of_number(group)
    own = sizes_from_full(x.shape[dim], tp_group, length)[tp_group.rank]
    return x.new_empty([own if index == dim else size for index, size in enumerate(x.shape)])


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.booster.tp_all_reduce(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        return torch.ops.booster.tp_all_reduce(x, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: int) -> torch.Tensor:
        ctx.how = how
        return torch.ops.booster.tp_all_gather(x, *how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.ops.booster.tp_reduce_scatter(grad, *ctx.how), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: int) -> torch.Tensor:
        ctx.how = how
        return torch.ops.booster.tp_reduce_scatter(x, *how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.ops.booster.tp_all_gather(grad, *ctx.how), None, None, None
