"""Differentiable collectives at the boundaries of tensor-parallel regions (Megatron-LM's mappings, arXiv:1909.08053).

Outside of a region tensors are replicated or, with sequence parallelism (arXiv:2205.05198), sharded over tokens. Inside
they are sharded over features. The backward of each function is another function of this file, so that double backward
works: copy and all-reduce, gather and split, all-gather and reduce-scatter.

In graphs of torch.compile they are operators, such as `booster::tp_all_reduce`, which the compiler does not look into.
They take the number of a group, as operators take no objects, and their results are new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, start_all_gather, start_all_reduce, start_reduce_scatter, sum_dtype
from booster.comm.fake import is_seen_by_modes
from booster.core.opaque_operator import opaque

from .group import TensorParallelGroup, group_of_number


def copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return a replicated tensor for computation on shards. Backward: `reduce_from_tp_region`.

    Collective: in backward.
    """
    if tp_group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling():
        return _TracedCopy.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]
    return _Copy.apply(x, tp_group)  # type: ignore[no-untyped-call, no-any-return]


def shared_copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `copy_to_tp_region(x)`, one copy for all layers that read `x`; see `TensorParallelGroup.shared_input`."""
    if tp_group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if not torch.compiler.is_compiling():
        return tp_group.shared_input(x, torch.Tensor, lambda one: copy_to_tp_region(one, tp_group))
    if tp_group.traced_input is not x:
        tp_group.traced_input, tp_group.traced_copy = x, copy_to_tp_region(x, tp_group)
    return tp_group.traced_copy  # type: ignore[return-value]


def reduce_from_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup, *, overwrites: bool = False) -> torch.Tensor:
    """All-reduce a tensor; 16-bit dtypes are summed in fp32 on the CPU. Backward: `copy_to_tp_region`.

    Args:
        x: Partial tensor of the same shape on all ranks.
        tp_group: The tensor-parallel group.
        overwrites: If True, the result may overwrite `x`, which has no other views. Under a dispatch mode it does not:
            selective activation checkpointing keeps `x` for the recomputation, and does not see that it is overwritten.

    Collective: yes.
    """
    if tp_group.size == 1:
        return x
    if torch.compiler.is_compiling():
        tp_group.end_traced_region()
        return _TracedAllReduce.apply(x, tp_group.number)  # type: ignore[no-untyped-call, no-any-return]
    return _AllReduce.apply(x, tp_group, overwrites)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_tp_region(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int = -1
) -> torch.Tensor:
    """All-gather a tensor along a dimension. Backward: `scatter_to_tp_region`.

    Args:
        x: Tensor with `sizes[rank]` features, or tokens; the other dimensions are equal on all ranks.
        tp_group: The tensor-parallel group.
        sizes: Number of features, or tokens, of each rank.
        dim: Dimension of the features, or tokens.

    Collective: yes.
    """
    if tp_group.size == 1:
        return x
    return _gather(tp_group.number, dim, x, *sizes)  # type: ignore[no-any-return]


def scatter_to_tp_region(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int = -1
) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor along a dimension. Backward: `gather_from_tp_region`.

    Collective: in backward.
    """
    if tp_group.size == 1:
        return x
    return _scatter(tp_group.number, dim, x, *sizes)  # type: ignore[no-any-return]


def all_gather_shards(x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """All-gather the tokens of a sequence for computation on shards. Backward: `reduce_scatter_shards`.

    Args:
        x: Tokens of this rank.
        tp_group: The tensor-parallel group.
        sizes: Number of tokens of each rank.
        dim: Dimension of the tokens. It may contain this rank's tokens of several sequences; the result is then
            concatenated rank by rank, as `reduce_scatter_shards` expects.

    Collective: in forward and backward.
    """
    if torch.compiler.is_compiling():
        return _traced_all_gather(x, tp_group.number, list(sizes), dim)  # type: ignore[no-any-return]
    return _Mapping.apply(x, all_gather_uneven, reduce_scatter_shards, tp_group, tuple(sizes), dim)  # type: ignore[no-untyped-call, no-any-return]


def reduce_scatter_shards(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int
) -> torch.Tensor:
    """Reduce-scatter a partial tensor over its tokens. Backward: `all_gather_shards`, with the same arguments.

    Collective: in forward and backward.
    """
    if torch.compiler.is_compiling():
        tp_group.end_traced_region()
        return _traced_reduce_scatter(x, tp_group.number, list(sizes), dim)  # type: ignore[no-any-return]
    return _Mapping.apply(x, _reduce_scatter_uneven, all_gather_shards, tp_group, tuple(sizes), dim)  # type: ignore[no-untyped-call, no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_from_tp_region(grad, ctx.tp_group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: TensorParallelGroup, overwrites: bool) -> torch.Tensor:
        ctx.tp_group = tp_group
        if overwrites and x.is_contiguous() and not is_seen_by_modes():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        start_all_reduce(x, tp_group.group).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return copy_to_tp_region(grad, ctx.tp_group), None, None


@torch.library.custom_op("booster::tp_all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the sum of a tensor over the group of a number. Collective: yes."""
    total = x.clone(memory_format=torch.contiguous_format)
    start_all_reduce(total, group_of_number(group).group).wait()
    return total


@all_reduce.register_fake
def _(x: torch.Tensor, group: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _TracedCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.booster.tp_all_reduce(grad, ctx.group), None


class _TracedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        return torch.ops.booster.tp_all_reduce(x, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Mapping(torch.autograd.Function):
    """A mapping of shards along a dimension, whose backward is another one with the same arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Any, backward: Any, *how: Any) -> torch.Tensor:
        ctx.run_backward, ctx.how = backward, how
        return run(x, *how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.run_backward(grad, *ctx.how), *[None] * (2 + len(ctx.how))


def _gather_shards(number: int, dim: int, x: torch.Tensor, *sizes: int) -> torch.Tensor:
    return _Mapping.apply(x, all_gather_uneven, scatter_to_tp_region, group_of_number(number), sizes, dim)  # type: ignore[no-untyped-call, no-any-return]


def _take_shard(number: int, dim: int, x: torch.Tensor, *sizes: int) -> torch.Tensor:
    return _Mapping.apply(x, _shard, gather_from_tp_region, group_of_number(number), sizes, dim)  # type: ignore[no-untyped-call, no-any-return]


_gather = opaque(_gather_shards, lambda number, dim, x, *sizes: x.new_empty(_resized(x, dim, sum(sizes))))
_scatter = opaque(
    _take_shard, lambda number, dim, x, *sizes: x.new_empty(_resized(x, dim, sizes[group_of_number(number).rank]))
)


@torch.library.custom_op("booster::tp_all_gather", mutates_args=())
def _traced_all_gather(x: torch.Tensor, group: int, sizes: list[int], dim: int) -> torch.Tensor:
    return all_gather_uneven(x, group_of_number(group), sizes, dim)


@_traced_all_gather.register_fake
def _(x: torch.Tensor, group: int, sizes: list[int], dim: int) -> torch.Tensor:
    return x.new_empty(_resized(x, dim, sum(sizes)))


@torch.library.custom_op("booster::tp_reduce_scatter", mutates_args=())
def _traced_reduce_scatter(x: torch.Tensor, group: int, sizes: list[int], dim: int) -> torch.Tensor:
    return _reduce_scatter_uneven(x, group_of_number(group), sizes, dim)


@_traced_reduce_scatter.register_fake
def _(x: torch.Tensor, group: int, sizes: list[int], dim: int) -> torch.Tensor:
    return x.new_empty(_resized(x, dim, sizes[group_of_number(group).rank]))


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.how = inputs


_traced_all_gather.register_autograd(
    lambda ctx, grad: (_traced_reduce_scatter(grad, *ctx.how), None, None, None), setup_context=_keep_arguments
)
_traced_reduce_scatter.register_autograd(
    lambda ctx, grad: (_traced_all_gather(grad, *ctx.how), None, None, None), setup_context=_keep_arguments
)


def _shard(x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    shard = x.narrow(dim, sum(sizes[: tp_group.rank]), sizes[tp_group.rank])
    return shard.clone(memory_format=torch.contiguous_format)  # callers may modify it in place


def _reduce_scatter_uneven(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int
) -> torch.Tensor:
    shard, wait = start_reduce_scatter_uneven(x, tp_group, sizes, dim)
    wait()
    return shard


def all_gather_uneven(x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """All-gather shards of uneven sizes, padded to the largest; not differentiable. Collective: yes."""
    if x.shape[dim] != sizes[tp_group.rank]:
        raise AssertionError(f"rank {tp_group.rank} has {x.shape[dim]} along dimension {dim}, not one of {list(sizes)}")
    local_size = sizes[tp_group.rank]
    if _is_outermost(x, dim, sizes):
        full = x.new_empty(_resized(x, dim, sum(sizes)))
        full.narrow(dim, tp_group.rank * local_size, local_size).copy_(x)
        start_all_gather(full.view(-1), tp_group.group).wait()
        return full
    shards = x.new_empty((len(sizes), *_resized(x, dim, max(sizes))))
    shards[tp_group.rank].narrow(dim, 0, local_size).copy_(x)
    start_all_gather(shards.view(-1), tp_group.group).wait()
    return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)], dim)


def sum_over(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of a tensor over a group, in the dtype of sums; not differentiable. Collective: yes."""
    total = x.detach().to(sum_dtype(x.dtype), memory_format=torch.contiguous_format, copy=True)
    return all_reduce_sum(total, group)


def start_reduce_scatter_uneven(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int, *, overwrites: bool = False
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start a reduce-scatter into shards of uneven sizes; `x` must not be modified until it is complete.

    Args:
        x: Partial tensor of the same shape on all ranks.
        tp_group: The tensor-parallel group.
        sizes: Sizes of the shards of all ranks.
        dim: Dimension of the shards.
        overwrites: If True, `x` may be overwritten, which saves a copy on other devices than the CPU.

    Returns:
        The output tensor of this rank's shard, and a function that waits until it is filled.

    Collective: yes.
    """
    if x.shape[dim] != sum(sizes):
        raise AssertionError(f"{x.shape[dim]} along dimension {dim} are not the {list(sizes)} of the ranks")
    local_size = sizes[tp_group.rank]
    shard = x.new_empty(_resized(x, dim, local_size))
    padded = shard if local_size == max(sizes) else x.new_empty(_resized(x, dim, max(sizes)))
    if _is_outermost(x, dim, sizes) and x.is_contiguous():
        shards = x.detach() if overwrites or x.device.type == "cpu" else x.detach().clone()
    else:
        shards = x.new_empty((len(sizes), *padded.shape))
        for target, size, stop in zip(shards, sizes, accumulate(sizes), strict=True):
            target.narrow(dim, 0, size).copy_(x.narrow(dim, stop - size, size))
            target.narrow(dim, size, target.shape[dim] - size).zero_()
    reduction = start_reduce_scatter(shards.view(-1), tp_group.group)

    def wait() -> None:
        reduction.wait(padded.view(-1), accumulate=False)
        if padded is not shard:
            shard.copy_(padded.narrow(dim, 0, local_size))

    return shard, wait


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _is_outermost(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> bool:
    """Whether the gathered tensor is the concatenation of equal shards in memory."""
    dim %= x.dim()
    return len(set(sizes)) == 1 and all(size == 1 for size in x.shape[:dim])
