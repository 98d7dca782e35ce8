"""All-to-all sequence parallelism, DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

An all-to-all gives each rank all tokens of some heads, and a second one returns the attention's output to the ranks of
the tokens. Both are repeated in backward. They send (P-1)/P of query, key and value, and of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from booster.comm import all_to_all_single
from booster.plugins.hybrid_parallel.sequence_parallel.order import TokenOrder
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks

__all__ = ["HeadShare", "all_to_all_attention", "head_shares"]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads that a rank computes, and the key heads that these read.

    Attributes:
        start: First query head.
        stop: End of the query heads, exclusive; `start` for a rank without heads.
        key_start: First key head.
        key_stop: End of the key heads, exclusive.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int


def head_shares(num_heads: int, num_key_heads: int, num_ranks: int) -> list[HeadShare]:
    """Return every rank's heads: full groups if the ranks divide them, otherwise query heads as evenly as possible.

    In the second case some key heads are replicated on several ranks.
    """
    per_group = num_heads // num_key_heads
    unit = per_group if num_key_heads % num_ranks == 0 else 1
    base, rest = divmod(num_heads // unit, num_ranks)
    shares, start = [], 0
    for rank in range(num_ranks):
        stop = start + (base + (rank < rest)) * unit
        key_stop = -(-stop // per_group) if stop > start else start // per_group
        shares.append(HeadShare(start, stop, start // per_group, key_stop))
        start = stop
    return shares


def all_to_all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: SequenceParallelRanks,
    order: TokenOrder,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the attention output of this rank's tokens over the full sequence; see `sequence_attention`.

    Collective: in forward and backward.
    """
    shares = head_shares(query.shape[1], key.shape[1], ranks.size)
    own, lengths = shares[ranks.rank], order.local_lengths()
    whole = _all_tokens(query, key, value, ranks, shares, lengths)
    query, key, value = (order.join(parts, 2) for parts in whole)
    if own.start == own.stop:
        output = query[..., :1].expand(*query.shape[:-1], value.shape[-1])
    else:
        key, value = _expanded(key, value, own, num_heads=query.shape[1], per_group=_per_group(shares))
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, own.start : own.stop]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        output = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)
    return _own_tokens(output, ranks, order, shares)


def _per_group(shares: Sequence[HeadShare]) -> int:
    return shares[-1].stop // shares[-1].key_stop if shares[-1].key_stop else 1


def _expanded(
    key: torch.Tensor, value: torch.Tensor, own: HeadShare, *, num_heads: int, per_group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if key.shape[1] == num_heads:
        return key, value
    groups = [head // per_group - own.key_start for head in range(own.start, own.stop)]
    index = torch.tensor(groups, device=key.device)
    return key.index_select(1, index), value.index_select(1, index)


def _all_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: SequenceParallelRanks,
    shares: Sequence[HeadShare],
    lengths: Sequence[int],
) -> list[list[torch.Tensor]]:
    """Return query, key and value of this rank's heads, as lists of all ranks' tokens, in one all-to-all."""
    batch, _, local_length, features = query.shape
    widths = (features, features, value.shape[-1])
    pieces = []
    for share in shares:
        heads = (
            query[:, share.start : share.stop],
            key[:, share.key_start : share.key_stop],
            value[:, share.key_start : share.key_stop],
        )
        pieces.append(torch.cat([part.reshape(-1) for part in heads]))
    per_token = [batch * sum(_head_widths(share, widths)) for share in shares]
    received = _exchange(
        torch.cat(pieces),
        ranks,
        payload_sizes=[local_length * size for size in per_token],
        output_sizes=[length * per_token[ranks.rank] for length in lengths],
        largest_size=max(lengths) * max(per_token),
    )
    own_widths = _head_widths(shares[ranks.rank], widths)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for length, piece in zip(lengths, received, strict=True):
        cut = piece.split([batch * length * size for size in own_widths])
        for target, flat, size, width in zip(parts, cut, own_widths, widths, strict=True):
            target.append(flat.view(batch, size // width, length, width))
    return parts


def _head_widths(share: HeadShare, widths: Sequence[int]) -> list[int]:
    """Return the number of elements per token of a rank's query, key and value heads."""
    num_heads, num_key_heads = share.stop - share.start, share.key_stop - share.key_start
    return [num_heads * widths[0], num_key_heads * widths[1], num_key_heads * widths[2]]


def _own_tokens(
    output: torch.Tensor, ranks: SequenceParallelRanks, order: TokenOrder, shares: Sequence[HeadShare]
) -> torch.Tensor:
    """Return all heads of this rank's tokens from each rank's heads of all tokens, in one all-to-all."""
    batch, _, _, width = output.shape
    lengths, own = order.local_lengths(), order.local_length(ranks.rank)
    counts = [share.stop - share.start for share in shares]
    pieces = [order.take(output, 2, rank).reshape(-1) for rank in range(ranks.size)]
    received = _exchange(
        torch.cat(pieces),
        ranks,
        payload_sizes=[batch * counts[ranks.rank] * length * width for length in lengths],
        output_sizes=[batch * count * own * width for count in counts],
        largest_size=batch * max(counts) * max(lengths) * width,
    )
    heads = [piece.view(batch, count, own, width) for piece, count in zip(received, counts, strict=True)]
    return torch.cat(heads, 1)


def _exchange(
    payload: torch.Tensor,
    ranks: SequenceParallelRanks,
    *,
    payload_sizes: Sequence[int],
    output_sizes: Sequence[int],
    largest_size: int,
) -> tuple[torch.Tensor, ...]:
    """Differentiable all-to-all; return what each rank sent. Collective: in forward and backward."""
    sizes = list(payload_sizes), list(output_sizes), largest_size
    received: torch.Tensor = _Exchange.apply(payload, ranks, *sizes)
    parts: tuple[torch.Tensor, ...] = received.split(sizes[1])
    return parts


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        payload: torch.Tensor,
        ranks: SequenceParallelRanks,
        payload_sizes: list[int],
        output_sizes: list[int],
        largest_size: int,
    ) -> torch.Tensor:
        ctx.ranks, ctx.sizes = ranks, (payload_sizes, output_sizes, largest_size)
        return _send(payload, ranks, payload_sizes, output_sizes, largest_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        payload_sizes, output_sizes, largest_size = ctx.sizes
        return _send(grad, ctx.ranks, output_sizes, payload_sizes, largest_size), None, None, None, None


def _send(
    payload: torch.Tensor, ranks: SequenceParallelRanks, sizes: list[int], output_sizes: list[int], largest_size: int
) -> torch.Tensor:
    output = payload.new_empty(sum(output_sizes))
    if {*sizes, *output_sizes} == {largest_size}:  # then the sizes of all other ranks are equal, too
        all_to_all_single(output, payload.contiguous(), ranks.group)
    else:
        all_to_all_single(
            output,
            payload.contiguous(),
            ranks.group,
            output_sizes=output_sizes,
            payload_sizes=sizes,
            largest_size=largest_size,
        )
    return output
