"""Collectives over tokens in chunks, overlapped with the matmuls of other chunks (async tensor parallelism).

Note [Collective matmul]
The tokens of all ranks are chunked at the same offsets. A chunk is a tensor of equal shards (rank, sequences, tokens,
features); ranks with fewer tokens pad their last shard with zeros. The chunks together have as many bytes as the
unchunked collective of `mappings`. Every chunk of a reduce-scatter is started as soon as it is computed, and all are
waited for at the end. All-gathers prefetch one chunk. Between ranks of one host the cores copy themselves: what
overlaps there is the wait for a rank that is behind, see Note [Pending work] in `booster.comm.shared_memory`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from booster.comm import AllGather, start_all_gather, start_reduce_scatter
from booster.comm.fake import unseen_by_modes
from booster.core.opaque_operator import opaque

from .deferred_wgrad import DeferredWGrad, weight_gradient_operands
from .group import TensorParallelGroup, group_of_number
from .mappings import all_gather_shards

_NUM_CHUNKS = 4


def is_chunked(x: torch.Tensor, tp_group: TensorParallelGroup, dim: int) -> bool:
    """Whether matmuls of tokens are chunked, if there are any; equal on all ranks.

    Args:
        x: Tokens of this rank or of all ranks, features last.
        tp_group: The tensor-parallel group.
        dim: Dimension of the tokens.
    """
    return tp_group.sequence_mode == "ring" and tp_group.size > 1 and dim == x.dim() - 2


class ChunkRange(NamedTuple):
    """Range of a chunk in the tokens of each rank."""

    start: int
    length: int


class TokenChunks:
    """Chunks of the tokens in the second to last dimension; the dimensions before it are sequences.

    Args:
        tp_group: The tensor-parallel group.
        sizes: Number of tokens of each rank, not all 0.

    Attributes:
        num_total: Number of tokens of all ranks.
    """

    def __init__(self, tp_group: TensorParallelGroup, sizes: Sequence[int]) -> None:
        self._tp_group = tp_group
        self._sizes = sizes
        self.num_total = sum(sizes)
        longest = max(sizes)
        length = -(-longest // _NUM_CHUNKS)
        self._offsets = list(itertools.accumulate(sizes[:-1], initial=0))
        self._ranges = [ChunkRange(start, min(length, longest - start)) for start in range(0, longest, length)]

    def all_gather(self, local: torch.Tensor) -> Iterator[tuple[ChunkRange, torch.Tensor]]:
        """All-gather chunk by chunk; while the caller computes, the next chunk is in flight.

        Args:
            local: Tokens of this rank.

        Yields:
            The range of a chunk, and its shards.

        Collective: yes.
        """
        local = _as_3d(local)
        prefetched: tuple[ChunkRange, torch.Tensor, AllGather] | None = None
        for following in itertools.chain((self._start_all_gather(local, chunk) for chunk in self._ranges), (None,)):
            if prefetched is not None:
                chunk, shards, work = prefetched
                work.wait()
                yield chunk, shards
            prefetched = following

    def reduce_scatter(
        self, compute: Callable[[ChunkRange], torch.Tensor], like: torch.Tensor, num_features: int
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Start a reduce-scatter of tokens that are computed chunk by chunk.

        Args:
            compute: Function of a chunk's range that returns its shards in a new tensor. It overlaps with the
                reduce-scatters of the previous chunks.
            like: Tensor with the output's dtype, device and leading dimensions.
            num_features: Number of features of the output.

        Returns:
            The output tensor, and a function that waits until it is filled.

        Collective: yes.
        """
        rank = self._tp_group.rank
        output = like.new_empty((*like.shape[:-2], self._sizes[rank], num_features))
        in_flight = []
        for chunk in self._ranges:
            shards = compute(chunk)
            reduction = start_reduce_scatter(shards.view(-1), self._tp_group.group)
            in_flight.append((chunk, shards[rank], reduction))

        def wait() -> None:
            tokens = _as_3d(output)
            for chunk, shard, reduction in in_flight:
                reduction.wait(shard.view(-1), accumulate=False)
                start, length = self._local_range(chunk, rank)
                tokens.narrow(1, start, length).copy_(shard.narrow(1, 0, length))
            in_flight.clear()

        return output, wait

    def write(self, shards: torch.Tensor, chunk: ChunkRange, full: torch.Tensor) -> None:
        """Write the shards of a chunk to their positions in the tokens of all ranks.

        Args:
            shards: Shards of the chunk (rank, sequences, tokens, features).
            chunk: Range of the chunk.
            full: Contiguous tensor of the tokens of all ranks.
        """
        full = _as_3d(full)
        for rank, offset in enumerate(self._offsets):
            start, length = self._local_range(chunk, rank)
            full.narrow(1, offset + start, length).copy_(shards[rank].narrow(1, 0, length))

    def read(self, full: torch.Tensor, chunk: ChunkRange) -> torch.Tensor:
        """Return the shards of a chunk, padded with zeros."""
        full = _as_3d(full)
        shards = full.new_empty((len(self._sizes), full.shape[0], chunk.length, full.shape[2]))
        for rank, offset in enumerate(self._offsets):
            start, length = self._local_range(chunk, rank)
            _copy_padded(shards[rank], full.narrow(1, offset + start, length))
        return shards

    def _start_all_gather(self, local: torch.Tensor, chunk: ChunkRange) -> tuple[ChunkRange, torch.Tensor, AllGather]:
        shards = local.new_empty((len(self._sizes), local.shape[0], chunk.length, local.shape[2]))
        _copy_padded(shards[self._tp_group.rank], local.narrow(1, *self._local_range(chunk, self._tp_group.rank)))
        return chunk, shards, start_all_gather(shards.view(-1), self._tp_group.group)

    def _local_range(self, chunk: ChunkRange, rank: int) -> tuple[int, int]:
        start = min(chunk.start, self._sizes[rank])
        return start, min(chunk.length, self._sizes[rank] - start)


def _copy_padded(shard: torch.Tensor, tokens: torch.Tensor) -> None:
    length = tokens.shape[1]
    shard.narrow(1, 0, length).copy_(tokens)
    shard.narrow(1, length, shard.shape[1] - length).zero_()


def _as_3d(x: torch.Tensor) -> torch.Tensor:
    """Return (sequences, tokens, features), a view if `x` is contiguous."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    tp_group: TensorParallelGroup,
    sizes: Sequence[int],
    *,
    is_transposed: bool,
    deferred: DeferredWGrad | None = None,
) -> torch.Tensor:
    """Return the reduce-scatter of `x @ weight.t()` over the tokens, like `reduce_scatter_shards` of that product.

    Args:
        x: Input with tokens in the second to last dimension, the same number on all ranks, and features last.
        weight: Weight (outputs, inputs).
        tp_group: The tensor-parallel group.
        sizes: Number of tokens of each rank, not all 0.
        is_transposed: If True, the weight is (inputs, outputs).
        deferred: The weight's deferrable gradient; optional, defaults to computing it in backward.

    Collective: in forward and backward.
    """
    with unseen_by_modes():  # products are reduced in place
        y: torch.Tensor = _MatmulReduceScatter.apply(x, weight, tp_group, tuple(sizes), is_transposed, deferred)  # type: ignore[no-untyped-call]
    return y


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        tp_group: TensorParallelGroup,
        sizes: tuple[int, ...],
        is_transposed: bool,
        deferred: DeferredWGrad | None,
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.tp_group, ctx.sizes, ctx.is_transposed, ctx.deferred = tp_group, sizes, is_transposed, deferred
        chunks = TokenChunks(tp_group, sizes)
        matrix = weight.t() if is_transposed else weight

        y, finish = chunks.reduce_scatter(
            lambda chunk: nn.functional.linear(chunks.read(x, chunk), matrix), x, matrix.shape[0]
        )
        finish()
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if weight is not None and ctx.is_transposed:
            weight = weight.t()
        if torch.is_grad_enabled():
            full = all_gather_shards(grad, ctx.tp_group, ctx.sizes, grad.dim() - 2)
            grad_x = None if weight is None else full @ weight
        else:
            full, grad_x = _all_gather_matmul(grad, weight, TokenChunks(ctx.tp_group, ctx.sizes))
        grad_weight = None
        if x is not None and ctx.needs_input_grad[1]:
            left, right = weight_gradient_operands(full, x, ctx.is_transposed)
            if ctx.deferred is not None and ctx.deferred.should_defer:
                ctx.deferred.put((left, right))
            else:
                grad_weight = left.t() @ right
        return grad_x, grad_weight, None, None, None, None


def _scatter_product(group: int, is_transposed: bool, x: torch.Tensor, weight: torch.Tensor, *sizes: int) -> Any:
    return matmul_reduce_scatter(x, weight, group_of_number(group), sizes, is_transposed=is_transposed)


def _scattered_product(group: int, is_transposed: bool, x: torch.Tensor, weight: torch.Tensor, *sizes: int) -> Any:
    own = sizes[group_of_number(group).rank]
    return x.new_empty((*x.shape[:-2], own, weight.shape[1 if is_transposed else 0]))


# `matmul_reduce_scatter` in graphs of torch.compile. Arguments: the group's number, whether the weight is transposed,
# the input, the weight, and each rank's number of tokens.
traced_matmul_reduce_scatter = opaque(_scatter_product, _scattered_product)


def _all_gather_matmul(
    grad: torch.Tensor, weight: torch.Tensor | None, chunks: TokenChunks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (*grad.shape[:-2], chunks.num_total)
    full = grad.new_empty((*shape, grad.shape[-1]))
    grad_x = None if weight is None else grad.new_empty((*shape, weight.shape[-1]))
    for chunk, shards in chunks.all_gather(grad):
        chunks.write(shards, chunk, full)
        if weight is not None and grad_x is not None:
            chunks.write(shards @ weight, chunk, grad_x)
    return full, grad_x
