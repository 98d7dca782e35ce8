"""Attention over a sequence whose tokens are sharded."""

from __future__ import annotations

import torch

from booster.comm import all_reduce_numbers
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.all_to_all import all_to_all_attention
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelGroup
from booster.plugins.hybrid_parallel.sequence_parallel.ring_attention import ring_attention

__all__ = ["sequence_attention"]


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sp_group: SequenceParallelGroup,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    length: int | None = None,
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention` over the full sequence for this rank's tokens.

    Args:
        query: Query (batch, heads, this rank's tokens, features); `sp_group.sharding_of` defines a rank's tokens.
        key: Key of the same shape, with the same number of heads or a divisor.
        value: Value like `key`, possibly with another number of features.
        sp_group: The sequence-parallel group.
        attn_mask: Boolean or additive mask of the full sequence in its original order, broadcastable to (batch, heads,
            tokens, tokens). Equal on all ranks; its gradient is partial.
        dropout_p: Dropout probability of attention weights, drawn from the default generator, whose state must differ
            between ranks.
        is_causal: If True, tokens do not attend to later ones; not with a mask.
        scale: Scale of the scores; optional, defaults to 1 / sqrt(features).
        enable_gqa: If True, keys may have fewer heads than queries, as in torch.
        length: Tokens of the full sequence; optional, defaults to an all-reduce.

    Returns:
        The output (batch, heads, this rank's tokens, features of value).

    Raises:
        ConfigError: The shapes do not match.

    Collective: in forward and backward.
    """
    query, key, value = _cast_by_autocast(query, key, value)
    if length is None:
        length = int(all_reduce_numbers([query.shape[-2]], sp_group.group)[0])
    _check_heads(query, key, value, enable_gqa=enable_gqa)
    if attn_mask is not None:
        attn_mask = _expand_mask(attn_mask, query, length, is_causal=is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = all_to_all_attention if sp_group.mode == "all_to_all" else ring_attention
    sharding = sp_group.sharding_of(length)
    return compute(
        query, key, value, sp_group, sharding, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale
    )


def _cast_by_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if query.dim() != 4 or key.shape[:-1] != value.shape[:-1] or query.shape[-2] != key.shape[-2]:
        raise ConfigError(
            f"attention over a sharded sequence does not support {shapes}: give (batch, heads, tokens, features)"
        )
    num_heads, num_groups = query.shape[1], key.shape[1]
    # torch broadcasts a single key head to all query heads, also without enable_gqa.
    fits = num_groups in (1, num_heads) or (enable_gqa and num_groups > 0 and num_heads % num_groups == 0)
    if not fits:
        raise ConfigError(
            f"attention got {shapes} with different numbers of heads: set enable_gqa=True, with a number of query heads"
            " that is a multiple of the key heads"
        )


def _expand_mask(mask: torch.Tensor, query: torch.Tensor, length: int, *, is_causal: bool) -> torch.Tensor:
    if is_causal:
        raise ConfigError("attention got a mask and is_causal=True: include the causal mask in the mask, as in torch")
    mask = mask.reshape(*(1 for _ in range(4 - mask.dim())), *mask.shape)
    fits = mask.shape[-1] in (1, length) and mask.shape[-2] in (1, length)
    if not fits or mask.shape[0] not in (1, query.shape[0]) or mask.shape[1] not in (1, query.shape[1]):
        raise ConfigError(
            f"attention of {query.shape[0]} sequences of {length} tokens and {query.shape[1]} heads got a mask of shape"
            f" {tuple(mask.shape)}, but needs the mask of the full sequences: create it outside of the layers, where"
            " sequences are unsharded, or use is_causal=True"
        )
    return mask.expand(-1, -1, -1, length)
