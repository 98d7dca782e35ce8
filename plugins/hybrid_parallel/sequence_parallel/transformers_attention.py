"""Sequence-parallel attention implementation for transformers models."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.interception import attend
from booster.plugins.hybrid_parallel.sequence_parallel.running import LayerContext, current_layer

__all__ = ["IMPLEMENTATION", "use_sequence_attention"]

IMPLEMENTATION = "booster_sequence_parallel"
# Replaces "eager", whose masks are complete; sdpa is causal without a mask, unless the module sets is_causal=False.
_EAGER = "booster_sequence_parallel_eager"
# Unsupported features of other implementations.
_UNSUPPORTED = {"softcap": "caps scores", "s_aux": "has sinks"}


def use_sequence_attention(model: nn.Module) -> None:
    """Make a transformers model or layer call sequence-parallel attention; other models are unchanged.

    The implementation's name is set in the model's configurations, in place, so it also replaces transformers' eager
    attention, whose matmuls could not be intercepted. Outside of stacks it is transformers' sdpa attention, with the
    masks of the replaced implementation. Configurations do not save the name.

    Raises:
        ConfigError: The model uses an implementation other than sdpa and eager.

    Collective: no.
    """
    if "transformers" not in sys.modules:
        return
    configs = {id(config): config for config in _configs(model)}
    if not configs:
        return
    _register()
    for config in configs.values():
        if config._attn_implementation not in (None, "eager", "sdpa", IMPLEMENTATION, _EAGER):
            raise ConfigError(
                f"{type(config).__name__} has attn_implementation={config._attn_implementation!r}, which does not"
                ' support sharded sequences: load the model with "sdpa" or "eager", which sequence parallelism replaces'
            )
    for config in configs.values():
        config._attn_implementation = _EAGER if config._attn_implementation in ("eager", _EAGER) else IMPLEMENTATION


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of modules that look up their attention by name.

    Other modules select "sdpa" by their class, so their configuration must stay, or compute attention with plain
    matmuls, which is refused when they run.
    """
    looking_up = [
        module
        for module in model.modules()
        if hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    ]
    found = (getattr(module, "config", None) for module in looking_up)
    return [config for config in found if hasattr(config, "_attn_implementation")]


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    AttentionInterface.register(_EAGER, functools.partial(_attention_forward, is_eager=True))
    AttentionMaskInterface.register(_EAGER, eager_mask)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    is_eager: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: (batch, heads, tokens, features) to (batch, tokens, heads, features)."""
    layer = current_layer()
    is_causal = False if is_eager else is_causal
    _check_supported(module, kwargs)
    if layer is None:
        return _dense_forward(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, kwargs
        )
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask = attention_mask
    if position_bias is not None:
        mask = _add_bias(position_bias, _mask_rows(layer, attention_mask, position_bias), is_causal=is_causal)
    output = attend(
        layer,
        query,
        key,
        value,
        mask,
        dropout,
        is_causal and mask is None,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _dense_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    position_bias: torch.Tensor | None,
    others: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if position_bias is not None:
        others = {**others, "position_bias": position_bias}
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
    )
    return output


def _mask_rows(layer: LayerContext, mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor | None:
    """Return the mask's rows of the bias: all, or this rank's in attention to another sequence."""
    if mask is None or mask.shape[-2] in (1, bias.shape[-2]):
        return mask
    sharding = layer.sp_group.sharding_of(mask.shape[-2])
    return sharding.shard(mask, mask.dim() - 2, layer.sp_group.rank)


def _add_bias(bias: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool) -> torch.Tensor:
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _check_supported(module: nn.Module, given: dict[str, Any]) -> None:
    for name, meaning in _UNSUPPORTED.items():
        if given.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} {meaning} ({name}), which attention over a sharded sequence does not support:"
                ' disable it in the config, or use sequence_parallelism_mode="split_gather"'
            )
    if given.get("output_attentions"):
        raise ConfigError(
            "output_attentions=True requests attention weights, which sequence parallelism never computes in full:"
            " leave it out"
        )
