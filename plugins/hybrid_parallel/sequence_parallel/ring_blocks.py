"""Attention of a block of keys and its gradients, such that blocks can be merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionBlock", "BlockGradients", "block_attention", "block_gradients", "supports_flash"]

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


@dataclass(frozen=True, slots=True)
class BlockGradients:
    """Gradients of a block's tensors; `mask` only if requested."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None


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
    weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
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
) -> BlockGradients:
    """Return a block's contribution to the gradients; see Note [Merging blocks].

    Args:
        query: Query of `block_attention`.
        key: Key of `block_attention`.
        value: Value of `block_attention`.
        output: Merged output of all blocks.
        lse: Merged lse of all blocks, finite.
        grad: Gradient of the merged output.
        block: Settings of the block in forward.
        needs_mask: If True, return the gradient of the mask in the shape of the scores.
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
        return BlockGradients(
            _upcast(grads[0]),
            _sum_groups(_upcast(grads[1]), num_groups),
            _sum_groups(_upcast(grads[2]), num_groups),
        )
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
    return BlockGradients(
        grad_query,
        _sum_groups(grad_key, num_groups),
        _sum_groups(grad_value, num_groups),
        grad_scores if needs_mask else None,
    )


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


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _repeat_key_value(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _sum_groups(grad: torch.Tensor, num_groups: int) -> torch.Tensor:
    return grad if grad.shape[1] == num_groups else grad.unflatten(1, (num_groups, -1)).sum(2)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.itemsize < 4 else x
