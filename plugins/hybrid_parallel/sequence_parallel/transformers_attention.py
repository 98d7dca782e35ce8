"""An attention implementation for transformers' models, which their configurations choose by name."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.interception import attend
from booster.plugins.hybrid_parallel.sequence_parallel.running import RunningLayer, running_layer

__all__ = ["IMPLEMENTATION", "use_sequence_attention"]

IMPLEMENTATION = "booster_sequence_parallel"
# In place of "eager", whose masks say all that limits attention; sdpa's is causal without one, unless a module denies
# it.
_EAGER = "booster_sequence_parallel_eager"
# What other implementations compute beside attention, and this one can't.
_UNKNOWN = {"softcap": "caps scores", "s_aux": "has sinks"}


def use_sequence_attention(model: nn.Module) -> None:
    """Has a transformers model or layer call attention that knows of split sequences; does nothing to any other one.

    The name is set in the model's configurations, in place, so it also replaces transformers' eager attention, whose
    matrix products could not be intercepted. Outside of stacks it is transformers' sdpa attention, with the masks of
    what it replaces. Configurations don't
    save the name. No communication.

    Raises:
        ConfigError: The model's attention can't be chosen by name, or is of a kind that can't be split.
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
                f"{type(config).__name__} asks for attn_implementation={config._attn_implementation!r}, which does not"
                ' know of sequences split over ranks: load the model with "sdpa" or "eager", in whose place sequence'
                " parallelism puts its own"
            )
    for config in configs.values():
        config._attn_implementation = _EAGER if config._attn_implementation in ("eager", _EAGER) else IMPLEMENTATION


def _configs(model: nn.Module) -> list[Any]:
    """Returns the configurations by which modules look their attention up, as most do.

    The others ask for "sdpa" by name, so that theirs has to stay; or compute by hand, which is refused when they run.
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
    """What transformers calls: (batch, heads, tokens, features) in, (batch, tokens, heads, features) out."""
    layer = running_layer()
    is_causal = False if is_eager else is_causal
    _refuse_unknown(module, kwargs)
    if layer is None:
        return _dense_forward(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, kwargs
        )
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask = attention_mask
    if position_bias is not None:
        mask = _biased(position_bias, _rows_of(layer, attention_mask, position_bias), is_causal=is_causal)
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


def _rows_of(layer: RunningLayer, mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor | None:
    """Returns a mask with the rows of the bias: all, or this rank's where attention to another sequence made it."""
    if mask is None or mask.shape[-2] in (1, bias.shape[-2]):
        return mask
    order = layer.ranks.order_of(mask.shape[-2])
    return order.take(mask, mask.dim() - 2, layer.ranks.rank)


def _biased(bias: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool) -> torch.Tensor:
    """Returns one mask that is added to scores, from the bias of T5's kind and what else limits attention."""
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _refuse_unknown(module: nn.Module, given: dict[str, Any]) -> None:
    for name, meaning in _UNKNOWN.items():
        if given.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} {meaning} ({name}), which attention over a sequence split over ranks doesn't:"
                ' turn it off in the config, or use sequence_parallelism_mode="split_gather"'
            )
    if given.get("output_attentions"):
        raise ConfigError(
            "output_attentions=True asks for attention weights, which sequence parallelism never has in one place:"
            " leave it out"
        )
