"""Attention of all tokens to all tokens, of which every rank holds its own."""

from __future__ import annotations

import torch

from booster.comm import all_reduce_numbers
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.all_to_all import all_to_all_attention
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks
from booster.plugins.hybrid_parallel.sequence_parallel.ring_attention import ring_attention

__all__ = ["sequence_attention"]


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: SequenceParallelRanks,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    length: int | None = None,
) -> torch.Tensor:
    """Returns this rank's rows of `F.scaled_dot_product_attention` over the whole sequence.

    Args:
        query: (batch, heads, this rank's tokens, features); which tokens, says `ranks.order_of`.
        key: The same, with as many heads or a divisor of them.
        value: As `key`; its features may be of another number.
        ranks: Those that share the sequence.
        attn_mask: Of the whole sequence in its original order: boolean or to be added, (batch or 1, heads or 1, tokens
            or 1, tokens) or what broadcasts to it. The same on all ranks; its gradient is of this rank's share.
        dropout_p: Probability of leaving a weight out, drawn from the default generator, which must not be in the same
            state on all ranks.
        is_causal: No token attends to a later one; not with a mask.
        scale: Of the scores; None: 1 / sqrt(features).
        enable_gqa: Needed where keys have fewer heads, as in torch.
        length: Tokens of the whole sequence; None: the ranks ask each other.

    Returns:
        (batch, heads, this rank's tokens, features of value).

    Raises:
        ConfigError: Shapes that don't fit together.

    Collective, also in backward.
    """
    query, key, value = _cast_by_autocast(query, key, value)
    if length is None:
        length = int(all_reduce_numbers([query.shape[-2]], ranks.group)[0])
    _require_fitting_heads(query, key, value, enable_gqa=enable_gqa)
    if attn_mask is not None:
        attn_mask = _checked_mask(attn_mask, query, length, is_causal=is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = all_to_all_attention if ranks.mode == "all_to_all" else ring_attention
    order = ranks.order_of(length)
    return compute(query, key, value, ranks, order, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale)


def _cast_by_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns what torch's own function would compute with."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _require_fitting_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if query.dim() != 4 or key.shape[:-1] != value.shape[:-1] or query.shape[-2] != key.shape[-2]:
        raise ConfigError(
            f"attention over a shared sequence can't take {shapes}: give (batch, heads, tokens, features)"
        )
    num_heads, num_groups = query.shape[1], key.shape[1]
    # A single key head is for all query heads without being asked for: torch broadcasts it.
    fits = num_groups in (1, num_heads) or (enable_gqa and num_groups > 0 and num_heads % num_groups == 0)
    if not fits:
        raise ConfigError(
            f"attention got {shapes}, of which the heads differ: set enable_gqa=True, with a number of query heads that"
            " key heads divide"
        )


def _checked_mask(mask: torch.Tensor, query: torch.Tensor, length: int, *, is_causal: bool) -> torch.Tensor:
    if is_causal:
        raise ConfigError("attention got a mask and is_causal=True: put what is causal into the mask, as torch asks")
    mask = mask.reshape(*(1 for _ in range(4 - mask.dim())), *mask.shape)
    fits = mask.shape[-1] in (1, length) and mask.shape[-2] in (1, length)
    if not fits or mask.shape[0] not in (1, query.shape[0]) or mask.shape[1] not in (1, query.shape[1]):
        raise ConfigError(
            f"attention of {query.shape[0]} sequences of {length} tokens and {query.shape[1]} heads got a mask of shape"
            f" {tuple(mask.shape)}, but needs that of whole sequences: make it outside of the layers, where they are"
            " whole, or use is_causal=True"
        )
    return mask.expand(-1, -1, -1, length)
