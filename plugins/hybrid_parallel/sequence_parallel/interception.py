"""Dispatch of attention calls in a stack's layers to sequence-parallel attention."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.attention import sequence_attention
from booster.plugins.hybrid_parallel.sequence_parallel.running import (
    LayerContext,
    current_layer,
    enter_layer,
    is_in_backward,
    subclass_of,
)

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.sequence_parallel.stacks import LayerStack

__all__ = ["AttentionDispatchMode", "attend", "intercept_submodules"]

_STACK = "_sequence_stack"
_dense_attention = F.scaled_dot_product_attention
# Cumulative functions, with which experts with a capacity count preceding tokens.
_NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
_CUMULATIVE = frozenset(getattr(where, name) for where in (torch, torch.Tensor) for name in _NAMES)


def attend(
    layer: LayerContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run `F.scaled_dot_product_attention` of this rank's tokens to all tokens, or to another, unsharded sequence.

    Args:
        layer: Context of the calling layer.
        query: Query of this rank's tokens.
        key: Key of this rank's tokens or of another sequence.
        value: Value, like `key`.
        attn_mask: Mask of the full sequence, as in torch.
        dropout_p: Dropout probability, as in torch.
        is_causal: If True, attention is causal, as in torch.
        scale: Scale of the scores, as in torch.
        enable_gqa: If True, keys may have fewer heads than queries, as in torch.

    Raises:
        ConfigError: The lengths do not match; see `LayerContext.is_whole` and `sequence_attention`.

    Collective: yes, except for attention to another sequence.
    """
    if query.dim() == 3:
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return attend(layer, query, key, value, mask, dropout_p, is_causal, scale).squeeze(1)
    sp_group = layer.sp_group
    local_length = query.shape[-2]
    length = layer.full_length(local_length)
    sharding = sp_group.sharding_of(length)
    if sharding.local_length(sp_group.rank) != local_length:
        raise ConfigError(
            f"attention got {local_length} queries in a stack where this rank has {sharding.local_length(sp_group.rank)} of"
            f" {length} tokens: give F.scaled_dot_product_attention (batch, heads, tokens, features), and the layers"
            " hidden states (batch, tokens, features)"
        )
    with layer.attention():
        if layer.is_unsharded(key.shape[-2], local_length):
            if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] == length > 1:
                attn_mask = sharding.shard(attn_mask, attn_mask.dim() - 2, sp_group.rank)
            return _dense_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return sequence_attention(
            query,
            key,
            value,
            sp_group,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            length=length,
        )


def _dispatch_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    layer = current_layer()
    if layer is None or layer.is_in_attention:
        return _dense_attention(*args, **kwargs)
    return attend(layer, *args, **kwargs)


class AttentionDispatchMode(TorchFunctionMode):
    """Torch function mode that dispatches attention calls of its thread, under any name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _dense_attention:
            return _dispatch_attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head_attention(func, args, kwargs)
        if func in _CUMULATIVE:
            _check_not_along_tokens(func, *args, **kwargs)
        return func(*args, **kwargs)


def _check_not_along_tokens(func: Any, x: torch.Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> None:
    layer = current_layer()
    if layer is None or layer.is_in_attention or layer.local_sizes is None or x.dim() < 2:
        return
    dim %= x.dim()
    is_along_sequences = dim == 1 and x.shape[:2] == layer.local_sizes
    if is_along_sequences or (dim == 0 and x.shape[0] == math.prod(layer.local_sizes)):
        raise ConfigError(
            f"{func.__name__} along the tokens of {tuple(x.shape)} in a layer of a stack, as experts with a capacity"
            " use it, would see this rank's tokens only, because sequence parallelism communicates in attention only:"
            " disable it, or do not shard the sequence (tp_size instead of sp_size)"
        )


def intercept_submodules(layer: nn.Module, stack: LayerStack) -> None:
    """Record the arguments of a layer's submodules, and dispatch attention if they are recomputed separately.

    Only submodules with children, such as an attention with projections. Their classes are replaced by subclasses of
    the same name.
    """
    for submodule in layer.modules():
        if (
            submodule is not layer
            and next(submodule.children(), None) is not None
            and not isinstance(submodule, nn.ModuleList)
        ):
            submodule.__dict__[_STACK] = stack
            submodule.__class__ = subclass_of(type(submodule), "part", _submodule_members)
            if {"query_length", "key_length"} <= set(_bias_arguments(submodule)):
                submodule.__class__ = subclass_of(type(submodule), "bias", _bias_members)


def _bias_arguments(submodule: nn.Module) -> Sequence[str]:
    compute_bias = getattr(submodule, "compute_bias", None)
    return () if compute_bias is None else tuple(inspect.signature(compute_bias).parameters)


def _submodule_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = current_layer()
        if running is not None:
            with running.submodule(args, kwargs):
                return base.forward(self, *args, **kwargs)
        if not is_in_backward():
            return base.forward(self, *args, **kwargs)
        with enter_layer(LayerContext(self.__dict__[_STACK], None, ())), AttentionDispatchMode():
            return base.forward(self, *args, **kwargs)

    return {"forward": forward}


def _bias_members(base: Any) -> dict[str, Any]:
    """Compute the relative position bias of T5-like models for the full sequence; attention takes its rows of it."""

    def compute_bias(self: Any, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        running = current_layer()
        if running is not None:
            is_own = key_length == query_length
            query_length = running.full_length(query_length)
            key_length = query_length if is_own else key_length
        bias: torch.Tensor = base.compute_bias(self, query_length, key_length, *args, **kwargs)
        return bias

    return {"compute_bias": compute_bias}


def _multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `F.multi_head_attention_forward`, which calls attention from torch's module while no mode is active."""
    layer = current_layer()
    before = layer.num_attentions if layer is not None else 0
    with _patched_attention():
        output = func(*args, **kwargs)
    if layer is not None and layer.num_attentions == before:
        raise ConfigError(
            "nn.MultiheadAttention was called with need_weights=True, so it does not use"
            " F.scaled_dot_product_attention, which sequence parallelism replaces: call it with need_weights=False"
        )
    return output


@contextmanager
def _patched_attention() -> Iterator[None]:
    torch.nn.functional.scaled_dot_product_attention = _dispatch_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _dense_attention
