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

from booster.comm import all_to_all_single
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import even_sizes

from .group import SequenceParallelGroup, SequenceSharding


@dataclass(frozen=True, slots=True)
class HeadRange:
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


def head_ranges(num_heads: int, num_key_heads: int, num_ranks: int) -> list[HeadRange]:
    """Return every rank's heads: full groups if the ranks divide them, otherwise query heads as evenly as possible.

    In the second case some key heads are replicated on several ranks.
    """
    per_group = num_heads // num_key_heads
    unit = per_group if num_key_heads % num_ranks == 0 else 1
    ranges, start = [], 0
    for size in even_sizes(num_heads // unit, num_ranks):
        stop = start + size * unit
        key_stop = -(-stop // per_group) if stop > start else start // per_group
        ranges.append(HeadRange(start, stop, start // per_group, key_stop))
        start = stop
    return ranges


def all_to_all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sp_group: SequenceParallelGroup,
    sharding: SequenceSharding,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the attention output of this rank's tokens over the full sequence; see `sequence_attention`.

    Collective: in forward and backward.
    """
    ranges = head_ranges(query.shape[1], key.shape[1], sp_group.size)
    local, lengths = ranges[sp_group.rank], sharding.local_lengths()
    gathered = _gather_tokens(query, key, value, sp_group, ranges, lengths)
    query, key, value = (sharding.unshard(shards, 2) for shards in gathered)
    if local.start == local.stop:
        output = query[..., :1].expand(*query.shape[:-1], value.shape[-1])
    else:
        num_heads, num_key_heads = ranges[-1].stop, ranges[-1].key_stop
        per_group = num_heads // num_key_heads if num_key_heads else 1
        key, value = _repeat_key_value(key, value, local, num_heads=query.shape[1], per_group=per_group)
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, local.start : local.stop]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        output = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)
    return _gather_heads(output, sp_group, sharding, ranges)


def _repeat_key_value(
    key: torch.Tensor, value: torch.Tensor, local: HeadRange, *, num_heads: int, per_group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if key.shape[1] == num_heads:
        return key, value
    groups = [head // per_group - local.key_start for head in range(local.start, local.stop)]
    index = torch.tensor(groups, device=key.device)
    return key.index_select(1, index), value.index_select(1, index)


def _gather_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sp_group: SequenceParallelGroup,
    ranges: Sequence[HeadRange],
    lengths: Sequence[int],
) -> list[list[torch.Tensor]]:
    """Return query, key and value of this rank's heads, as lists of all ranks' tokens, in one all-to-all."""
    batch, _, local_length, features = query.shape
    widths = (features, features, value.shape[-1])
    send_buffers = []
    widths_of_ranks = []  # elements per token of each rank's query, key and value heads
    for heads_of_rank in ranges:
        num_heads = heads_of_rank.stop - heads_of_rank.start
        num_key_heads = heads_of_rank.key_stop - heads_of_rank.key_start
        widths_of_ranks.append([num_heads * widths[0], num_key_heads * widths[1], num_key_heads * widths[2]])
        heads = (
            query[:, heads_of_rank.start : heads_of_rank.stop],
            key[:, heads_of_rank.key_start : heads_of_rank.key_stop],
            value[:, heads_of_rank.key_start : heads_of_rank.key_stop],
        )
        send_buffers.append(torch.cat([tensor.reshape(-1) for tensor in heads]))
    per_token = [batch * sum(widths_of_rank) for widths_of_rank in widths_of_ranks]
    received = _all_to_all(
        torch.cat(send_buffers),
        sp_group,
        send_sizes=[local_length * size for size in per_token],
        output_sizes=[length * per_token[sp_group.rank] for length in lengths],
        largest_size=max(lengths) * max(per_token),
    )
    own_widths = widths_of_ranks[sp_group.rank]
    shards: list[list[torch.Tensor]] = [[], [], []]
    for length, buffer in zip(lengths, received, strict=True):
        flats = buffer.split([batch * length * size for size in own_widths])
        for target, flat, size, width in zip(shards, flats, own_widths, widths, strict=True):
            target.append(flat.view(batch, size // width, length, width))
    return shards


def _gather_heads(
    output: torch.Tensor, sp_group: SequenceParallelGroup, sharding: SequenceSharding, ranges: Sequence[HeadRange]
) -> torch.Tensor:
    """Return all heads of this rank's tokens from each rank's heads of all tokens, in one all-to-all."""
    batch, _, _, width = output.shape
    lengths, local = sharding.local_lengths(), sharding.local_length(sp_group.rank)
    counts = [heads_of_rank.stop - heads_of_rank.start for heads_of_rank in ranges]
    send_buffers = [sharding.shard(output, 2, rank).reshape(-1) for rank in range(sp_group.size)]
    received = _all_to_all(
        torch.cat(send_buffers),
        sp_group,
        send_sizes=[batch * counts[sp_group.rank] * length * width for length in lengths],
        output_sizes=[batch * count * local * width for count in counts],
        largest_size=batch * max(counts) * max(lengths) * width,
    )
    heads = [buffer.view(batch, count, local, width) for buffer, count in zip(received, counts, strict=True)]
    return torch.cat(heads, 1)


def _all_to_all(
    send_buffer: torch.Tensor,
    sp_group: SequenceParallelGroup,
    *,
    send_sizes: Sequence[int],
    output_sizes: Sequence[int],
    largest_size: int,
) -> tuple[torch.Tensor, ...]:
    """Differentiable all-to-all; return what each rank sent. Collective: in forward and backward."""
    sizes = list(send_sizes), list(output_sizes), largest_size
    received: torch.Tensor = _AllToAll.apply(send_buffer, sp_group, *sizes)
    chunks: tuple[torch.Tensor, ...] = received.split(sizes[1])
    return chunks


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        send_buffer: torch.Tensor,
        sp_group: SequenceParallelGroup,
        send_sizes: list[int],
        output_sizes: list[int],
        largest_size: int,
    ) -> torch.Tensor:
        ctx.sp_group, ctx.sizes = sp_group, (output_sizes, send_sizes, largest_size)
        output, send_buffer = send_buffer.new_empty(sum(output_sizes)), send_buffer.contiguous()
        if {*send_sizes, *output_sizes} == {largest_size}:  # then the sizes of all other ranks are equal, too
            all_to_all_single(output, send_buffer, sp_group.group)
        else:
            all_to_all_single(
                output,
                send_buffer,
                sp_group.group,
                output_sizes=output_sizes,
                payload_sizes=send_sizes,
                largest_size=largest_size,
            )
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.sp_group, *ctx.sizes), None, None, None, None
