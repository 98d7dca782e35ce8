"""Differentiable collectives at the boundaries of tensor-parallel regions (Megatron-LM's mappings, arXiv:1909.08053).

Outside of a region tensors are replicated or, with sequence parallelism (arXiv:2205.05198), sharded over tokens. Inside
they are sharded over features. The backward of each function is another function of this file, so that double backward
works: copy and all-reduce, gather and split, all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from booster.comm import all_gather_numbers, start_all_gather, start_all_reduce, start_reduce_scatter
from booster.comm.fake import is_seen_by_modes

from .group import TensorParallelGroup


def copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return a replicated tensor for computation on shards. Backward: `reduce_from_tp_region`.

    Collective: in backward.
    """
    if tp_group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, tp_group)  # type: ignore[no-untyped-call, no-any-return]


def shared_copy_to_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Return `copy_to_tp_region(x)`, one copy for all layers that read `x`; see `TensorParallelGroup.shared_input`."""
    if tp_group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return tp_group.shared_input(x, torch.Tensor, lambda one: copy_to_tp_region(one, tp_group))


def reduce_from_tp_region(x: torch.Tensor, tp_group: TensorParallelGroup, *, overwrites: bool = False) -> torch.Tensor:
    """All-reduce a tensor; 16-bit dtypes are summed in fp32 on the CPU. Backward: `copy_to_tp_region`.

    Args:
        x: Partial tensor of the same shape on all ranks.
        tp_group: The tensor-parallel group.
        overwrites: If True, the result may overwrite `x`, which has no other views. Under a dispatch mode it does not:
            selective activation checkpointing keeps `x` for the recomputation, and does not see that it is overwritten.

    Collective: yes.
    """
    return x if tp_group.size == 1 else _AllReduce.apply(x, tp_group, overwrites)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_tp_region(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int = -1
) -> torch.Tensor:
    """All-gather a tensor along a dimension. Backward: `scatter_to_tp_region`.

    Args:
        x: Tensor with `sizes[rank]` features; the other dimensions are equal on all ranks.
        tp_group: The tensor-parallel group.
        sizes: Number of features of each rank.
        dim: Dimension of the features.

    Collective: yes.
    """
    if tp_group.size == 1:
        return x
    return _Mapping.apply(x, all_gather_uneven, _scatter, tp_group, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_tp_region(
    x: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int], dim: int = -1
) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor along a dimension. Backward: `gather_from_tp_region`.

    Collective: in backward.
    """
    if tp_group.size == 1:
        return x
    return _Mapping.apply(x, _shard, _gather, tp_group, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def local_sequence_length(length: int, size: int, rank: int) -> int:
    """Return a rank's number of tokens of a sequence; the first ranks get one more if the length is not divisible."""
    base, rest = divmod(length, size)
    return base + (rank < rest)


def scatter_to_sequence_region(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's tokens of a replicated tensor. Backward: `gather_from_sequence_region`, collective."""
    return scatter_to_tp_region(x, tp_group, sizes_from_full(x.shape[dim], tp_group, None), dim)


def gather_from_sequence_region(
    x: torch.Tensor, tp_group: TensorParallelGroup, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """All-gather the tokens of a sequence into a replicated tensor. Backward: `scatter_to_sequence_region`.

    Args:
        x: Tokens of this rank.
        tp_group: The tensor-parallel group.
        dim: Dimension of the tokens.
        length: Tokens of the full sequence; optional, defaults to `tp_group.sequence_length`.

    Collective: yes.
    """
    return gather_from_tp_region(x, tp_group, sizes_of_ranks(x, dim, tp_group, length), dim)


def all_gather_shards(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """All-gather the tokens of a sequence for computation on shards. Backward: `reduce_scatter_shards`.

    Args:
        x: Tokens of this rank.
        tp_group: The tensor-parallel group.
        dim: Dimension of the tokens. It may contain this rank's tokens of several sequences; the result is then
            concatenated rank by rank, as `reduce_scatter_shards` expects.
        sizes: Number of tokens of each rank.

    Collective: in forward and backward.
    """
    return _Mapping.apply(x, all_gather_uneven, reduce_scatter_shards, tp_group, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def reduce_scatter_shards(
    x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Reduce-scatter a partial tensor over its tokens. Backward: `all_gather_shards`, with the same arguments.

    Collective: in forward and backward.
    """
    return _Mapping.apply(x, reduce_scatter_uneven, all_gather_shards, tp_group, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def sizes_of_ranks(x: torch.Tensor, dim: int, tp_group: TensorParallelGroup, length: int | None = None) -> list[int]:
    """Return all ranks' numbers of tokens, from those of this rank.

    Collective for flattened tokens of sequences that have fewer than there are ranks: one without any cannot tell of
    how many sequences.
    """
    full = tp_group.sequence_length if length is None else length
    if x.dim() < 3 and full is not None and full < tp_group.size:
        return [size for (size,) in all_gather_numbers([x.shape[dim]], tp_group.group)]
    return sizes_from_local(x.shape[dim], tp_group, length)


def sizes_from_local(local_size: int, tp_group: TensorParallelGroup, length: int | None) -> list[int]:
    """Return all ranks' sizes of a sharded dimension, from this rank's size `local_size`."""
    length = tp_group.sequence_length if length is None else length
    if length is None:
        raise AssertionError("the length of the full sequence is not set")
    lengths = [local_sequence_length(length, tp_group.size, rank) for rank in range(tp_group.size)]
    local_length = lengths[tp_group.rank]
    if local_size == local_length:
        return lengths
    if local_length == 0 or local_size % local_length:
        raise AssertionError(f"{local_size} tokens are not this rank's {local_length} tokens of sequences of {length}")
    return [local_size // local_length * one for one in lengths]


def sizes_from_full(full_size: int, tp_group: TensorParallelGroup, length: int | None) -> list[int]:
    """Return all ranks' sizes of a dimension after sharding, from its full size `full_size`."""
    length = full_size if length is None else length
    if length and full_size % length:
        raise AssertionError(f"{full_size} tokens are not a multiple of the sequence length {length}")
    count = full_size // length if length else 0
    return [count * local_sequence_length(length, tp_group.size, rank) for rank in range(tp_group.size)]


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


class _Mapping(torch.autograd.Function):
    """A mapping of shards along a dimension, whose backward is another one with the same arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Any, backward: Any, *how: Any) -> torch.Tensor:
        ctx.run_backward, ctx.how = backward, how
        return run(x, *how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.run_backward(grad, *ctx.how), *[None] * (2 + len(ctx.how))


def _gather(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return gather_from_tp_region(x, tp_group, sizes, dim)


def _scatter(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return scatter_to_tp_region(x, tp_group, sizes, dim)


def _shard(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    shard = x.narrow(dim, sum(sizes[: tp_group.rank]), sizes[tp_group.rank])
    return shard.clone(memory_format=torch.contiguous_format)  # callers may modify it in place


def reduce_scatter_uneven(
    x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Return the result of `start_reduce_scatter_uneven`; not differentiable. Collective: yes."""
    shard, wait = start_reduce_scatter_uneven(x, tp_group, dim, sizes)
    wait()
    return shard


def all_gather_uneven(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
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


def start_reduce_scatter_uneven(
    x: torch.Tensor, tp_group: TensorParallelGroup, dim: int, sizes: Sequence[int], *, overwrites: bool = False
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start a reduce-scatter into shards of uneven sizes; `x` must not be modified until it is complete.

    Args:
        x: Partial tensor of the same shape on all ranks.
        tp_group: The tensor-parallel group.
        dim: Dimension of the shards.
        sizes: Sizes of the shards of all ranks.
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
