"""Mappings of tensor-parallel regions in the graphs of torch.compile: `copy` and `reduce` of `mappings`.

The collective is an operator of its own, `booster::tp_all_reduce`, which the compiler does not look into. It takes the
number of a group, as operators take no objects, and its result is a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from booster.comm import start_all_reduce

from .group import TensorParallelGroup, group_of_number


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
    tp_group.traced_input = tp_group.traced_copy = None  # the region ends, and nothing outlives the graph
    return _AllReduce.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]


@torch.library.custom_op("booster::tp_all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the sum of a tensor over the group of a number. Collective: yes."""
    total = x.clone(memory_format=torch.contiguous_format)
    start_all_reduce(total, group_of_number(group).group).wait()
    return total


@all_reduce.register_fake
def _(x: torch.Tensor, group: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


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
