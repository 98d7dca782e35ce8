"""How tensors enter and leave what the ranks compute apart from each other: each way forward has its way backward.

Note [Regions]
Outside of a region the ranks hold the same tensors (or, with sequence parallelism, each its own tokens of them), inside
each its own features. What is an identity in one direction is a sum over the ranks in the other: a tensor that all
ranks read gets a gradient from each, and one that each rank adds to has the same gradient on all. Gathering goes with
cutting, and a sum of which each rank keeps its own part with gathering (Megatron-LM, arXiv:1909.08053; with the
sequence split, arXiv:2205.05198). So every function here has another one of this file as its backward, which may be
differentiated again.
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
    """Returns a tensor that is the same on all ranks, for each of them to compute with. Backward: `sum_over_ranks`.

    Collective in backward.
    """
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, ranks)  # type: ignore[no-untyped-call, no-any-return]


def shared_copy_to_ranks(x: torch.Tensor, ranks: TensorParallelRanks) -> torch.Tensor:
    """Returns what `copy_to_ranks` returns, the same for layers that read the same tensor: see Note [Shared inputs]."""
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return ranks.shared(x, torch.Tensor, lambda one: copy_to_ranks(one, ranks))


def sum_over_ranks(x: torch.Tensor, ranks: TensorParallelRanks, *, overwrites: bool = False) -> torch.Tensor:
    """Returns the sum of the ranks' tensors, in fp32 where they are lower. Backward: `copy_to_ranks`.

    Args:
        x: The same shape on all ranks.
        ranks: Who sums.
        overwrites: The sum may take the memory of `x`, of which nothing else has a view.

    Collective.
    """
    return x if ranks.size == 1 else _Sum.apply(x, ranks, overwrites)  # type: ignore[no-untyped-call, no-any-return]


def gather_features(x: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the ranks' tensors joined along the last dimension. Backward: `split_features`.

    Args:
        x: `sizes[rank]` features on this rank; the other dimensions are the same on all.
        ranks: Who gathers.
        sizes: Features of each rank.

    Collective.
    """
    return _joined(x, ranks, -1, sizes)


def split_features(x: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> torch.Tensor:
    """Returns this rank's part of the last dimension of a tensor that all ranks hold. Backward: `gather_features`.

    Collective in backward.
    """
    return _own_part(x, ranks, -1, sizes)


def sequence_length(length: int, size: int, rank: int) -> int:
    """Returns how many of so many tokens a rank takes; the first ranks take one more where they don't divide."""
    base, rest = divmod(length, size)
    return base + (rank < rest)


def gather_sequence(
    x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """Returns the whole sequence, for each rank to compute with. Backward: `scatter_sequence_sum`.

    Args:
        x: This rank's tokens.
        ranks: Who gathers.
        dim: Along which the tokens lie. It may hold those of several sequences, this rank's tokens of each; those of
            all ranks are then joined rank by rank, an order that the backward and `scatter_sequence_sum` know.
        length: Tokens of the whole sequence; None: `ranks.sequence_length`.

    Collective, also in backward.
    """
    sizes = sizes_of_own(x.shape[dim], ranks, length)
    return x if ranks.size == 1 else gather_parts(x, ranks, dim, sizes)


def scatter_sequence_sum(
    x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """Returns this rank's tokens of the sum of the ranks' tensors. Backward: `gather_sequence`.

    Args:
        x: The same shape on all ranks.
        ranks: Who sums.
        dim: Along which the tokens lie.
        length: Tokens of the whole sequence, where the dimension holds those of several as `gather_sequence` joins
            them; None: as many as the dimension has.

    Collective, also in backward.
    """
    sizes = sizes_of_all(x.shape[dim], ranks, length)
    return x if ranks.size == 1 else scatter_sum(x, ranks, dim, sizes)


def split_sequence(x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1) -> torch.Tensor:
    """Returns this rank's tokens of a tensor that all ranks hold. Backward: `join_sequence`. Collective in backward."""
    return _own_part(x, ranks, dim, sizes_of_all(x.shape[dim], ranks, None))


def join_sequence(x: torch.Tensor, ranks: TensorParallelRanks, dim: int = 1, length: int | None = None) -> torch.Tensor:
    """Returns the whole sequence as a tensor that is the same on all ranks. Backward: `split_sequence`.

    Args:
        x: This rank's tokens.
        ranks: Who gathers.
        dim: Along which the tokens lie.
        length: Tokens of the whole sequence; None: `ranks.sequence_length`.

    Collective.
    """
    return _joined(x, ranks, dim, sizes_of_own(x.shape[dim], ranks, length))


def gather_parts(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Does what `gather_sequence` does, with what each rank holds of the dimension given. Collective both ways."""
    return _GatherToCompute.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


def scatter_sum(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Does what `scatter_sequence_sum` does, with what each rank gets of the dimension given. Collective both ways."""
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
    """Returns how much each rank holds along a dimension of which this rank has `own`."""
    length = ranks.sequence_length if length is None else length
    if length is None:
        raise AssertionError("nobody has said how long the whole sequence is")
    lengths = [sequence_length(length, ranks.size, rank) for rank in range(ranks.size)]
    mine = lengths[ranks.rank]
    if own == mine:
        return lengths
    if mine == 0 or own % mine:
        raise AssertionError(f"{own} tokens are not this rank's {mine} tokens of sequences of {length}")
    return [own // mine * one for one in lengths]


def sizes_of_all(whole: int, ranks: TensorParallelRanks, length: int | None) -> list[int]:
    """Returns how much each rank gets along a dimension that all hold whole."""
    length = whole if length is None else length
    if length and whole % length:
        raise AssertionError(f"{whole} tokens are not whole sequences of {length}")
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
        return part.clone(memory_format=torch.contiguous_format)  # what follows may change it in place

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
    """Joins the ranks' parts; shorter ones travel with a gap behind them, as pieces are of one length."""
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
    """Starts the sum of the ranks' tensors, of which each keeps its own part; nobody may touch `x` until the end.

    Returns:
        Room for this rank's part, and a function that waits until it is there.
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
    """Returns whether equal parts behind each other in memory are the joined tensor."""
    dim %= x.dim()
    return len(set(sizes)) == 1 and all(size == 1 for size in x.shape[:dim])
