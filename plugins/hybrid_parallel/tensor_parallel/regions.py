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

from booster.comm import start_all_gather, start_all_reduce, start_reduce_scatter
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks

__all__ = [
    "copy_to_ranks",
    "gather_features",
    "gather_parts",
    "gather_sequence",
    "gathered",
    "join_sequence",
    "scatter_sequence_sum",
    "scatter_sum",
    "sequence_length",
    "shared_copy_to_ranks",
    "sizes_of_all",
    "sizes_of_own",
    "split_features",
    "split_sequence",
    "start_summed_part",
    "sum_over_ranks",
]


def copy_to_ranks(x: torch.Tensor, ranks: TensorParallelRanks) -> torch.Tensor:
    """Return a replicated tensor for computation on shards. Backward: `sum_over_ranks`.

    Collective: in backward.
    """
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, ranks)  # type: ignore[no-untyped-call, no-any-return]


def shared_copy_to_ranks(x: torch.Tensor, ranks: TensorParallelRanks) -> torch.Tensor:
    """Return `copy_to_ranks(x)`, one copy for all layers that read `x`; see `TensorParallelRanks.shared`."""
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return ranks.shared(x, torch.Tensor, lambda one: copy_to_ranks(one, ranks))


def sum_over_ranks(x: torch.Tensor, ranks: TensorParallelRanks, *, overwrites: bool = False) -> torch.Tensor:
    """All-reduce a tensor; half-precision dtypes are summed in fp32. Backward: `copy_to_ranks`.

    Args:
        x: Partial tensor of the same shape on all ranks.
        ranks: The tensor-parallel group.
        overwrites: If True, the result may overwrite `x`, which has no other views.

    Collective: yes.
    """
    return x if ranks.size == 1 else _Sum.apply(x, ranks, overwrites)  # type: ignore[no-untyped-call, no-any-return]


def gather_features(x: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> torch.Tensor:
    """All-gather a tensor along the last dimension. Backward: `split_features`.

    Args:
        x: Tensor with `sizes[rank]` features; the other dimensions are equal on all ranks.
        ranks: The tensor-parallel group.
        sizes: Number of features of each rank.

    Collective: yes.
    """
    return _joined(x, ranks, -1, sizes)


def split_features(x: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor's last dimension. Backward: `gather_features`.

    Collective: in backward.
    """
    return _own_part(x, ranks, -1, sizes)


def sequence_length(length: int, size: int, rank: int) -> int:
    """Return a rank's number of tokens of a sequence; the first ranks get one more if the length is not divisible."""
    base, rest = divmod(length, size)
    return base + (rank < rest)


def gather_sequence(
    x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """All-gather the tokens of a sequence for computation on shards. Backward: `scatter_sequence_sum`.

    Args:
        x: Tokens of this rank.
        ranks: The tensor-parallel group.
        dim: Dimension of the tokens. It may contain this rank's tokens of several sequences; the result is then
            concatenated rank by rank, as `scatter_sequence_sum` expects.
        length: Tokens of the full sequence; optional, defaults to `ranks.sequence_length`.

    Collective: in forward and backward.
    """
    sizes = sizes_of_own(x.shape[dim], ranks, length)
    return x if ranks.size == 1 else gather_parts(x, ranks, dim, sizes)


def scatter_sequence_sum(
    x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """Reduce-scatter a tensor over its tokens. Backward: `gather_sequence`.

    Args:
        x: Partial tensor of the same shape on all ranks.
        ranks: The tensor-parallel group.
        dim: Dimension of the tokens.
        length: Tokens of the full sequence if the dimension contains several sequences in the order of
            `gather_sequence`; optional, defaults to the dimension's size.

    Collective: in forward and backward.
    """
    sizes = sizes_of_all(x.shape[dim], ranks, length)
    return x if ranks.size == 1 else scatter_sum(x, ranks, dim, sizes)


def split_sequence(x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1) -> torch.Tensor:
    """Return this rank's tokens of a replicated tensor. Backward: `join_sequence`. Collective: in backward."""
    return _own_part(x, ranks, dim, sizes_of_all(x.shape[dim], ranks, None))


def join_sequence(x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None) -> torch.Tensor:
    """All-gather the tokens of a sequence into a replicated tensor. Backward: `split_sequence`.

    Args:
        x: Tokens of this rank.
        ranks: The tensor-parallel group.
        dim: Dimension of the tokens.
        length: Tokens of the full sequence; optional, defaults to `ranks.sequence_length`.

    Collective: yes.
    """
    return _joined(x, ranks, dim, sizes_of_own(x.shape[dim], ranks, length))


def gather_parts(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return `gather_sequence` for given shard sizes. Collective: in forward and backward."""
    return _GatherToCompute.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def scatter_sum(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return `scatter_sequence_sum` for given shard sizes. Collective: in forward and backward."""
    return _ScatterSum.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def _joined(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    if ranks.size == 1:
        return x
    return _Join.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def _own_part(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    if ranks.size == 1:
        return x
    return _Cut.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def sizes_of_own(own: int, ranks: TensorParallelRanks, length: int | None) -> list[int]:
    """Return all ranks' sizes of a sharded dimension, from this rank's size `own`."""
    length = ranks.sequence_length if length is None else length
    if length is None:
        raise AssertionError("the length of the full sequence is not set")
    lengths = [sequence_length(length, ranks.size, rank) for rank in range(ranks.size)]
    mine = lengths[ranks.rank]
    if own == mine:
        return lengths
    if mine == 0 or own % mine:
        raise AssertionError(f"{own} tokens are not this rank's {mine} tokens of sequences of {length}")
    return [own // mine * one for one in lengths]


def sizes_of_all(whole: int, ranks: TensorParallelRanks, length: int | None) -> list[int]:
    """Return all ranks' sizes of a dimension after sharding, from its full size `whole`."""
    length = whole if length is None else length
    if length and whole % length:
        raise AssertionError(f"{whole} tokens are not a multiple of the sequence length {length}")
    count = whole // length if length else 0
    return [count * sequence_length(length, ranks.size, rank) for rank in range(ranks.size)]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_ranks(grad, ctx.ranks), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, overwrites: bool) -> torch.Tensor:
        ctx.ranks = ranks
        if overwrites and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        start_all_reduce(x, ranks.group).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return copy_to_ranks(grad, ctx.ranks), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.sizes = ranks, dim, sizes
        return gathered(x, ranks, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own_part(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.sizes = ranks, dim, sizes
        part = x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank])
        return part.clone(memory_format=torch.contiguous_format)  # callers may modify it in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _joined(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _GatherToCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.sizes = ranks, dim, sizes
        return gathered(x, ranks, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return scatter_sum(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.sizes = ranks, dim, sizes
        part, finish = start_summed_part(x, ranks, dim, sizes)
        finish()
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gather_parts(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


def gathered(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """All-gather shards of uneven sizes, padded to the largest; not differentiable. Collective: yes."""
    if x.shape[dim] != sizes[ranks.rank]:
        raise AssertionError(f"rank {ranks.rank} has {x.shape[dim]} along dimension {dim}, not one of {list(sizes)}")
    own = sizes[ranks.rank]
    if _lies_outermost(x, dim, sizes):
        joined = x.new_empty(_resized(x, dim, sum(sizes)))
        joined.narrow(dim, ranks.rank * own, own).copy_(x)
        start_all_gather(joined.view(-1), ranks.group).wait()
        return joined
    pieces = x.new_empty((len(sizes), *_resized(x, dim, max(sizes))))
    pieces[ranks.rank].narrow(dim, 0, own).copy_(x)
    start_all_gather(pieces.view(-1), ranks.group).wait()
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(pieces, sizes, strict=True)], dim)


def start_summed_part(
    x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start a reduce-scatter into shards of uneven sizes; `x` must not be modified until it is complete.

    Returns:
        The output tensor of this rank's shard, and a function that waits until it is filled.

    Collective: yes.
    """
    if x.shape[dim] != sum(sizes):
        raise AssertionError(f"{x.shape[dim]} along dimension {dim} are not the {list(sizes)} of the ranks")
    own = sizes[ranks.rank]
    part = x.new_empty(_resized(x, dim, own))
    piece = part if own == max(sizes) else x.new_empty(_resized(x, dim, max(sizes)))
    if _lies_outermost(x, dim, sizes) and x.is_contiguous():
        pieces = x.detach()
    else:
        pieces = x.new_empty((len(sizes), *piece.shape))
        for target, size, stop in zip(pieces, sizes, accumulate(sizes), strict=True):
            target.narrow(dim, 0, size).copy_(x.narrow(dim, stop - size, size))
            target.narrow(dim, size, target.shape[dim] - size).zero_()
    reduction = start_reduce_scatter(pieces.view(-1), ranks.group)

    def finish() -> None:
        reduction.finish(piece.view(-1), accumulate=False)
        if piece is not part:
            part.copy_(piece.narrow(dim, 0, own))

    return part, finish


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _lies_outermost(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> bool:
    """Whether the gathered tensor is the concatenation of equal shards in memory."""
    dim %= x.dim()
    return len(set(sizes)) == 1 and all(size == 1 for size in x.shape[:dim])
