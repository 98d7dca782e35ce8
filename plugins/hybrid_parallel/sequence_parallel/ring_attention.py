"""Ring attention (Liu et al. 2023, arXiv:2310.01889) in zigzag order.

Each rank keeps its queries. In P - 1 steps keys and values are passed around the ring, so a rank holds the keys of at
most two ranks at a time. Each rank sends P - 1 times its keys and values in forward, and again with their gradients in
backward. Zigzag order balances causal attention; see Note [Zigzag order].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from booster.comm import all_to_all_single, host_value, sum_dtype
from booster.comm.fake import unseen_by_modes

from .group import SequenceParallelGroup, SequenceSharding

# Note [Merging blocks]
# Softmax over all keys is computed from softmaxes over blocks of them (Milakov & Gimelshein 2018; FlashAttention-2, Dao
# 2023). Each block returns its output and its lse, the logarithm of the sum of its exponentials. Merging computes
# lse = logaddexp(lse_1, lse_2) and output = sum of output_i * exp(lse_i - lse). In backward a block's weights are
# exp(scores - lse) with the merged lse, and the merged output and its gradient are used for every block, so the blocks
# are independent.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Settings of a block's attention.

    Attributes:
        scale: Scale of the scores.
        is_causal: If True, query i attends to the keys up to i of the block.
        mask: Boolean or additive mask, broadcastable to (batch, heads, queries, keys), or None.
        dropout: Dropout probability of attention weights.
        seed: Seed of the dropout mask, in forward and backward.
    """

    scale: float
    is_causal: bool = False
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: AttentionBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (batch, heads, queries, features) and its lse (batch, heads, queries), both in fp32 or higher.

    A fully masked query has output 0 and lse -inf.

    Args:
        query: Query (batch, heads, queries, features).
        key: Key (batch, heads or a divisor, keys, features).
        value: Value like `key`, possibly with another number of features.
        block: Settings of the block.
    """
    key, value = _repeat_key_value(key, query.shape[1]), _repeat_key_value(value, query.shape[1])
    if supports_flash(query, value, block):
        additive_mask = _additive_mask(block.mask, query.dtype)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.is_causal, attn_mask=additive_mask, scale=block.scale
        )
        if additive_mask is not None:  # the kernel's result of a fully masked query depends on torch's version
            is_fully_masked = (additive_mask == -torch.inf).all(-1)
            lse = lse.masked_fill(is_fully_masked, -torch.inf)
            output = output.masked_fill(is_fully_masked.unsqueeze(-1), 0.0)
        return _upcast(output), lse
    scores = _scores(query, key, block)
    lse = scores.logsumexp(-1)
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(scores - finite_lse.unsqueeze(-1))
    dropout_factors = _dropout_factors(weights, block)
    weights = weights if dropout_factors is None else weights * dropout_factors
    return weights @ _upcast(value), lse


def block_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    block: AttentionBlock,
    *,
    needs_mask: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a block's contributions to the gradients of query, key, value and mask; see Note [Merging blocks].

    Args:
        query: Query of `block_attention`.
        key: Key of `block_attention`.
        value: Value of `block_attention`.
        output: Merged output of all blocks.
        lse: Merged lse of all blocks, finite.
        grad: Gradient of the merged output.
        block: Settings of the block in forward.
        needs_mask: If True, return the gradient of the mask in the shape of the scores, otherwise None.
    """
    num_groups = key.shape[1]
    key, value = _repeat_key_value(key, query.shape[1]), _repeat_key_value(value, query.shape[1])
    if not needs_mask and supports_flash(query, value, block):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(query.dtype),
            query,
            key,
            value,
            output.to(query.dtype),
            lse,
            0.0,
            block.is_causal,
            attn_mask=_additive_mask(block.mask, query.dtype),
            scale=block.scale,
        )
        # One after the other: each is upcast with all query heads.
        grad_key, grad_value = (_sum_groups(_upcast(one), num_groups) for one in grads[1:3])
        return _upcast(grads[0]), grad_key, grad_value, None
    grad, value = _upcast(grad), _upcast(value)
    weights = torch.exp(_scores(query, key, block) - lse.unsqueeze(-1))
    dropout_factors = _dropout_factors(weights, block)
    grad_weights = grad @ value.transpose(-1, -2)
    grad_weights = grad_weights if dropout_factors is None else grad_weights * dropout_factors
    row_sums = (grad * output).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_sums)
    grad_value = (weights if dropout_factors is None else weights * dropout_factors).transpose(-1, -2) @ grad
    grad_query = grad_scores @ _upcast(key) * block.scale
    grad_key = grad_scores.transpose(-1, -2) @ _upcast(query) * block.scale
    grad_mask = grad_scores if needs_mask else None
    return grad_query, _sum_groups(grad_key, num_groups), _sum_groups(grad_value, num_groups), grad_mask


def supports_flash(query: torch.Tensor, value: torch.Tensor, block: AttentionBlock) -> bool:
    """Whether the CPU's fused kernel supports this block."""
    has_rows = query.numel() > 0 and value.numel() > 0
    return query.device.type == "cpu" and block.dropout == 0.0 and query.shape[-1] == value.shape[-1] and has_rows


def _scores(query: torch.Tensor, key: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    scores = _upcast(query) @ _upcast(key).transpose(-1, -2) * block.scale
    if block.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    additive_mask = _additive_mask(block.mask, scores.dtype)
    return scores if additive_mask is None else scores + additive_mask


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.detach().to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _dropout_factors(weights: torch.Tensor, block: AttentionBlock) -> torch.Tensor | None:
    if block.dropout == 0.0:
        return None
    generator = torch.Generator(device=weights.device).manual_seed(block.seed)
    draws = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (draws >= block.dropout).to(weights.dtype) / max(1.0 - block.dropout, torch.finfo(weights.dtype).tiny)


def _repeat_key_value(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _sum_groups(grad: torch.Tensor, num_groups: int) -> torch.Tensor:
    return grad if grad.shape[1] == num_groups else grad.unflatten(1, (num_groups, -1)).sum(2)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(sum_dtype(x.dtype))


_MAX_SCORES = 2**26  # attention scores that are materialized at a time without a fused kernel


def ring_attention(
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
    if mask is not None and mask.dtype != torch.bool:
        mask = _shift_padding_rows(mask)
    seed = int(torch.randint(2**62, ()).item()) if dropout > 0.0 else 0
    ring = _Ring(sp_group, sharding, is_causal, AttentionBlock(scale=scale, dropout=dropout, seed=seed))
    with unseen_by_modes():  # output tiles are merged in place
        output: torch.Tensor = _RingAttention.apply(query, key, value, mask, ring)
    return output


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile of the scores: ranges of local queries and keys, with their mask."""

    queries: slice
    keys: slice
    block: AttentionBlock
    mask_rows: slice | None = None
    mask_columns: slice | None = None


@dataclass(frozen=True, slots=True)
class _Ring:
    sp_group: SequenceParallelGroup
    sharding: SequenceSharding
    is_causal: bool
    block: AttentionBlock

    def sources(self) -> Iterator[int]:
        """Yield the rank whose keys are present in each step, starting with this rank."""
        for step in range(self.sp_group.size):
            yield (self.sp_group.rank - step) % self.sp_group.size

    def tiles(self, source: int, mask: torch.Tensor | None) -> list[_Tile]:
        block = replace(self.block, seed=(self.block.seed + source) % 2**63)
        if mask is not None:
            return list(self._masked_tiles(source, mask, block))
        all_queries = slice(0, self.sharding.local_length(self.sp_group.rank))
        all_keys = slice(0, self.sharding.local_length(source))
        if not self.is_causal:
            return [_Tile(all_queries, all_keys, block)]
        if source == self.sp_group.rank:
            return [_Tile(all_queries, all_keys, replace(block, is_causal=True))]
        first_chunk, _ = self.sharding.local_chunks(min(source, self.sp_group.rank))[0]
        if source < self.sp_group.rank:  # the source's first chunk precedes both local chunks, its last follows them
            return [_Tile(all_queries, first_chunk, block)]
        return [_Tile(slice(first_chunk.stop, all_queries.stop), all_keys, block)]

    def _masked_tiles(self, source: int, mask: torch.Tensor, block: AttentionBlock) -> Iterator[_Tile]:
        for queries, rows in self.sharding.local_chunks(self.sp_group.rank):
            rows = rows if mask.shape[-2] > 1 else slice(None)
            for keys, columns in self.sharding.local_chunks(source):
                seen = mask[:, :, rows, columns]
                if seen.numel() and (seen.dtype != torch.bool or host_value(seen.any())):
                    seed = (block.seed + self.sp_group.size * (1 + 2 * queries.start + keys.start)) % 2**63
                    yield _Tile(queries, keys, replace(block, mask=seen, seed=seed), rows, columns)

    def rotate(self, tensors: Sequence[torch.Tensor], source: int) -> list[torch.Tensor]:
        """Send a source's tensors (batch, heads, tokens, features) to the next rank; receive the previous source's."""
        size, rank = self.sp_group.size, self.sp_group.rank
        incoming = (source - 1) % size
        lengths = self.sharding.local_lengths()
        per_token = sum(tensor.shape[0] * tensor.shape[1] * tensor.shape[3] for tensor in tensors)
        send_buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        output = send_buffer.new_empty(per_token * lengths[incoming])
        send_sizes, output_sizes = [0] * size, [0] * size
        send_sizes[(rank + 1) % size] = send_buffer.numel()
        output_sizes[(rank - 1) % size] = output.numel()
        all_to_all_single(
            output,
            send_buffer,
            self.sp_group.group,
            output_sizes=output_sizes,
            payload_sizes=send_sizes,
            largest_size=per_token * max(lengths),
        )
        shapes = [(*tensor.shape[:2], lengths[incoming], tensor.shape[3]) for tensor in tensors]
        sizes = [shape[0] * shape[1] * shape[2] * shape[3] for shape in shapes]
        return [flat.view(shape) for flat, shape in zip(output.split(sizes), shapes, strict=True)]


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        ring: _Ring,
    ) -> torch.Tensor:
        query, own_key, own_value = query.contiguous(), key.contiguous(), value.contiguous()
        key, value = own_key, own_value
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        last = (ring.sp_group.rank + 1) % ring.sp_group.size
        for source in ring.sources():
            for tile in _limit_rows(ring.tiles(source, mask), query, value, needs_scores=False):
                _merge(output, lse, query, key, value, tile)
            if source != last:
                key, value = ring.rotate((key, value), source)
        lse.masked_fill_(lse == -torch.inf, 0.0)  # scores of fully masked queries are -inf, so their weights are 0
        ctx.ring = ring
        ctx.save_for_backward(query, own_key, own_value, mask, output.to(query.dtype), lse)
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, output, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad = grad.contiguous()
        needs_mask = ctx.needs_input_grad[3]
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        grad_key = torch.zeros_like(key, dtype=lse.dtype)
        grad_value = torch.zeros_like(value, dtype=lse.dtype)
        grad_mask = torch.zeros(mask.shape, dtype=lse.dtype, device=lse.device) if needs_mask else None
        last = (ring.sp_group.rank + 1) % ring.sp_group.size
        for source in ring.sources():
            for tile in _limit_rows(ring.tiles(source, mask), query, value, needs_scores=needs_mask):
                queries = tile.queries
                block_query, block_key, block_value, block_mask = block_gradients(
                    query[:, :, queries],
                    key[:, :, tile.keys],
                    value[:, :, tile.keys],
                    output[:, :, queries],
                    lse[:, :, queries],
                    grad[:, :, queries],
                    tile.block,
                    needs_mask=needs_mask,
                )
                grad_query[:, :, queries] += block_query
                grad_key[:, :, tile.keys] += block_key
                grad_value[:, :, tile.keys] += block_value
                if grad_mask is not None and block_mask is not None:
                    rows = grad_mask[:, :, tile.mask_rows or slice(None), tile.mask_columns or slice(None)]
                    rows += block_mask.sum_to_size(rows.shape)
            if source != last:
                key, value = ring.rotate((key, value), source)
            if ring.sp_group.size > 1:  # gradients rotate with their keys, and one step further to the keys' rank
                grad_key, grad_value = ring.rotate((grad_key, grad_value), source)
        grads = (one.to(query.dtype) for one in (grad_query, grad_key, grad_value))
        return *grads, None if grad_mask is None else grad_mask.to(mask.dtype), None


def _limit_rows(
    tiles: Sequence[_Tile], query: torch.Tensor, value: torch.Tensor, *, needs_scores: bool
) -> Iterator[_Tile]:
    """Yield tiles of fewer queries where no fused kernel is used, to limit the memory of scores."""
    for tile in tiles:
        if supports_flash(query, value, tile.block) and not needs_scores:
            yield tile
            continue
        num_keys = max(tile.keys.stop - tile.keys.start, 1)
        step = max(_MAX_SCORES // (query.shape[0] * query.shape[1] * num_keys), 1)
        for start in range(tile.queries.start, tile.queries.stop, step):
            yield from _tile_rows(tile, start, min(start + step, tile.queries.stop))


def _tile_rows(tile: _Tile, start: int, stop: int) -> Iterator[_Tile]:
    first, last = start - tile.queries.start, stop - tile.queries.start
    block = replace(tile.block, seed=_derive_seed(tile.block.seed, start))
    if block.mask is not None and block.mask.shape[-2] > 1:
        block = replace(block, mask=block.mask[:, :, first:last])
    rows = tile.mask_rows
    if rows is not None and rows.start is not None:
        rows = slice(rows.start + first, rows.start + last)
    if not block.is_causal:
        yield replace(tile, queries=slice(start, stop), mask_rows=rows, block=block)
        return
    if first > 0:
        before = replace(block, is_causal=False, seed=_derive_seed(block.seed, -1))
        yield replace(
            tile, queries=slice(start, stop), keys=slice(tile.keys.start, tile.keys.start + first), block=before
        )
    own = slice(tile.keys.start + first, tile.keys.start + last)
    yield replace(tile, queries=slice(start, stop), keys=own, block=block)


def _derive_seed(seed: int, index: int) -> int:
    """Derive the seed of a tile; odd multiples of a constant decorrelate neighboring tiles."""
    return (seed + (2 * index + 1) * 0x9E3779B97F4A7C15) % 2**63


def _merge(
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tile: _Tile,
) -> None:
    """Merge a block into the accumulated output and lse, in place; see Note [Merging blocks]."""
    queries = query[:, :, tile.queries]
    if queries.numel() == 0 or tile.keys.stop == tile.keys.start:
        return
    added, added_lse = block_attention(queries, key[:, :, tile.keys], value[:, :, tile.keys], tile.block)
    total, total_lse = output[:, :, tile.queries], lse[:, :, tile.queries]
    merged = torch.logaddexp(total_lse, added_lse)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    total.mul_(torch.exp(total_lse - finite).unsqueeze(-1))
    total.add_(added.mul_(torch.exp(added_lse - finite).unsqueeze(-1)))
    total_lse.copy_(merged)


def _shift_padding_rows(mask: torch.Tensor) -> torch.Tensor:
    """Shift rows of an additive mask that only contain minima of the dtype to a maximum of 0.

    These rows are padding, whose output is not used, but blocks with such a low lse could not be merged.
    """
    peaks = mask.detach().amax(-1, keepdim=True)
    is_low = (peaks > -torch.inf) & (peaks <= torch.finfo(mask.dtype).min / 2)
    return mask - peaks.masked_fill(~is_low, 0.0)
