"""Dispatch of attention calls in a stack's layers to sequence-parallel attention."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.core.activation_policy import BY_OPERATION, RECOMPUTED, WHOLE_LAYERS
from booster.core.compiling import COMPILED, calls_compiled
from booster.core.layer_stacks import subclass_of
from booster.core.opaque_operator import autocast_dtype, call_in_graph, opaque
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.rng import generator_states

from .example_draws import ExampleDrawMode, call_drawing
from .group import SequenceParallelGroup
from .layer_context import (
    SEQUENCE_INFO,
    LayerContext,
    SequenceInfo,
    ShardedStack,
    current_layer,
    enter_layer,
    is_in_backward,
    no_attention_error,
)
from .ring_attention import ring_attention
from .ulysses import all_to_all_attention


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sp_group: SequenceParallelGroup,
    *,
    length: int,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention` over the full sequence for this rank's tokens.

    Args:
        query: Query (batch, heads, this rank's tokens, features); `sp_group.sharding_of` defines a rank's tokens.
        key: Key of the same shape, with the same number of heads or a divisor.
        value: Value like `key`, possibly with another number of features.
        sp_group: The sequence-parallel group.
        length: Tokens of the full sequence.
        attn_mask: Boolean or additive mask of the full sequence in its original order, broadcastable to (batch, heads,
            tokens, tokens). Equal on all ranks; its gradient is partial.
        dropout_p: Dropout probability of attention weights, drawn from the default generator, whose state must differ
            between ranks.
        is_causal: If True, tokens do not attend to later ones; not with a mask.
        scale: Scale of the scores; optional, defaults to 1 / sqrt(features).
        enable_gqa: If True, keys may have fewer heads than queries, as in torch.

    Returns:
        The output (batch, heads, this rank's tokens, features of value).

    Raises:
        ConfigError: The shapes do not match.

    Collective: in forward and backward.
    """
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _check_heads(query, key, value, enable_gqa=enable_gqa)
    if attn_mask is not None:
        attn_mask = _expand_mask(attn_mask, query, length, is_causal=is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = all_to_all_attention if sp_group.mode == "all_to_all" else ring_attention
    sharding = sp_group.sharding_of(length)
    if sharding.is_replicated:
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return _dense_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
    return compute(
        query, key, value, sp_group, sharding, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale
    )


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


_STACK = "_sequence_stack"
_DRAWS_NOTHING = "_draws_nothing"  # attribute of a layer: whether its last forward in training drew no numbers
_dense_attention = F.scaled_dot_product_attention
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
# Cumulative functions, with which experts with a capacity count preceding tokens.
_NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
_CUMULATIVE = frozenset(getattr(where, name) for where in (torch, torch.Tensor) for name in _NAMES)


def _dispatch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run `F.scaled_dot_product_attention`, for this rank's tokens in a layer of a stack."""
    rest = attn_mask, dropout_p, is_causal, scale, enable_gqa
    output: torch.Tensor = _attend_in_layer(_visible(), query, key, value, None, *rest)
    return output


def _visible() -> tuple[bool, ...] | None:
    """Return `LayerContext.visible` of the running layer, which in a graph is known while it is traced only."""
    layer = current_layer()
    return None if layer is None else layer.visible


def _attend(
    visible: tuple[bool, ...] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run `F.scaled_dot_product_attention` of this rank's tokens to all tokens, or to another, unsharded sequence.

    The mask is that of the full sequence. Collective: yes, except for attention to another sequence.
    """
    layer = current_layer()
    if layer is None or layer.is_in_attention:
        return _dense_attention(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    layer.visible = visible
    if bias is not None:
        mask = _add_bias(layer, bias, mask, is_causal=is_causal)
    is_causal = is_causal and mask is None
    if query.dim() == 3:
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return _attend(visible, query, key, value, None, mask, dropout, is_causal, scale, False).squeeze(1)
    sp_group, local_length = layer.sp_group, query.shape[-2]
    length = layer.full_length(local_length)
    sharding = sp_group.sharding_of(length)
    if sharding.local_length(sp_group.rank) != local_length:
        raise ConfigError(
            f"attention got {local_length} queries in a stack where this rank has"
            f" {sharding.local_length(sp_group.rank)} of {length} tokens: give F.scaled_dot_product_attention (batch,"
            " heads, tokens, features), and the layers hidden states (batch, tokens, features)"
        )
    with layer.attention():
        if layer.is_unsharded(key.shape[-2], local_length):
            if mask is not None and mask.dim() > 1 and mask.shape[-2] == length > 1:
                mask = sharding.shard(mask, mask.dim() - 2, sp_group.rank)
            return _dense_attention(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
        return sequence_attention(
            query,
            key,
            value,
            sp_group,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            length=length,
        )


def _attention_output(visible: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=autocast_dtype(query))


_attend_in_layer = opaque(_attend, _attention_output)


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
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile can trace it in a mode
        return call_drawing(func, args, kwargs)


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


def install_layer_context(layer: nn.Module, stack: ShardedStack) -> None:
    """Replace a layer's class by a subclass of the same name whose forward takes a `SequenceInfo` and sets the context.

    This is not a hook, because activation checkpointing recomputes a forward without its hooks.

    Args:
        layer: Layer of a stack.
        stack: The stack. If its attention sees this rank's tokens only, attention calls of the layer are dispatched.
    """
    layer.__dict__[_STACK] = stack
    _intercept_submodules(layer, stack)
    if not stack.shards_attention:
        layer.__class__ = subclass_of(
            type(layer), "drawing for examples", _drawing_members, below=COMPILED | RECOMPUTED
        )
        layer.__class__ = subclass_of(type(layer), "running", _running_members, below=RECOMPUTED)
        return
    use_sequence_attention(layer)
    layer.__class__ = subclass_of(type(layer), "intercepted", _intercepted_members, below=COMPILED | RECOMPUTED)
    # Outside of graphs, which would not set the thread's context.
    layer.__class__ = subclass_of(type(layer), "attending", _attending_members, below={WHOLE_LAYERS, BY_OPERATION})


def _drawing_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training or current_layer() is None:
            return base.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            with ExampleDrawMode():
                return base.forward(self, *args, **kwargs)
        # The mode costs some microseconds for each operator: it is left out after a forward that drew no numbers.
        before = generator_states()
        with contextlib.nullcontext() if vars(self).get(_DRAWS_NOTHING) else ExampleDrawMode():
            output = base.forward(self, *args, **kwargs)
        self.__dict__[_DRAWS_NOTHING] = all(map(torch.equal, before, generator_states()))
        return output

    return {"forward": forward}


def _running_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        info: SequenceInfo | None = kwargs.pop(SEQUENCE_INFO, None)
        if info is None:
            return base.forward(self, *args, **kwargs)
        stack: ShardedStack = self.__dict__[_STACK]
        hidden = kwargs[info.hidden] if isinstance(info.hidden, str) else args[info.hidden]
        stack.splitter.set_sequences(info.length, hidden.shape[0])
        if torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        try:
            with enter_layer(LayerContext(stack, info.length, ())):
                return base.forward(self, *args, **kwargs)
        except RuntimeError as error:
            if not re.search(r"must match|size mismatch|is invalid for input", str(error)):
                raise
            raise ConfigError(
                f"{type(self).__name__} failed on this rank's {hidden.shape[1]} of {info.length} tokens ({error}):"
                " probably it combines them with a tensor of all tokens, as sequence parallelism on the tensor-parallel"
                " axis shards hidden states only: use sequence_parallelism_mode='all_to_all', which has a separate"
                " axis, or disable it"
            ) from error

    return {"forward": forward}


def _intercepted_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_layer() is None:
            return base.forward(self, *args, **kwargs)
        with AttentionDispatchMode():
            return base.forward(self, *args, **kwargs)

    return {"forward": forward}


def _attending_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        info: SequenceInfo | None = kwargs.pop(SEQUENCE_INFO, None)
        if info is None and not is_in_backward():
            return base.forward(self, *args, **kwargs)
        stack: ShardedStack = self.__dict__[_STACK]
        if info is None:
            running = LayerContext(stack, None, ())
        else:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            unsharded = tuple(given[key] for key in info.unsharded)
            running = LayerContext(stack, info.length, unsharded, tuple(given[info.hidden].shape[:2]))
        with enter_layer(running):
            try:
                output = base.forward(self, *args, **kwargs)
            except (RuntimeError, ValueError) as error:  # shape errors of attention implemented by plain matmuls
                is_of_compiler = type(error).__module__.startswith("torch._dynamo")
                if running.num_attentions == 0 and not (is_of_compiler or isinstance(error, ConfigError)):
                    raise no_attention_error(base.__name__, (*args, *kwargs.values())) from error
                raise
        if running.num_attentions == 0:
            raise no_attention_error(base.__name__, (*args, *kwargs.values()))
        return output

    return {"forward": calls_compiled(forward)}


def _intercept_submodules(layer: nn.Module, stack: ShardedStack) -> None:
    """Record the arguments of a layer's submodules, and intercept functions if they are recomputed separately.

    Only submodules with children, such as an attention with projections. Their classes are replaced by subclasses of
    the same name.
    """
    for submodule in layer.modules():
        is_leaf = next(submodule.children(), None) is None
        if submodule is layer or is_leaf or isinstance(submodule, nn.ModuleList):
            continue
        submodule.__dict__[_STACK] = stack
        submodule.__class__ = subclass_of(type(submodule), "submodule", _submodule_members)
        compute_bias = getattr(submodule, "compute_bias", None)
        names = () if compute_bias is None else inspect.signature(compute_bias).parameters
        if {"query_length", "key_length"} <= set(names):
            submodule.__class__ = subclass_of(type(submodule), "bias", _bias_members)


def _submodule_members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = current_layer()
        if running is not None:
            with running.submodule(args, kwargs):
                return base.forward(self, *args, **kwargs)
        if not is_in_backward():
            return base.forward(self, *args, **kwargs)
        stack: ShardedStack = self.__dict__[_STACK]
        mode = AttentionDispatchMode if stack.shards_attention else ExampleDrawMode
        with enter_layer(LayerContext(stack, None, ())), mode():
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
    if not torch.compiler.is_compiling():
        return _run_multi_head_attention(func, args, kwargs)
    output = call_in_graph(
        _multi_head_output, _multi_head_shape, _visible(), func, len(args), tuple(kwargs), *args, *kwargs.values()
    )
    return output, None  # weights are an error


def _multi_head_output(
    visible: tuple[bool, ...] | None, func: Any, num_args: int, names: tuple[str, ...], *values: Any
) -> torch.Tensor:
    layer = current_layer()
    if layer is not None:
        layer.visible = visible
    kwargs = dict(zip(names, values[num_args:], strict=True))
    output: torch.Tensor = _run_multi_head_attention(func, values[:num_args], kwargs)[0]
    return output


def _multi_head_shape(visible: Any, func: Any, num_args: int, names: Any, query: torch.Tensor, *rest: Any) -> Any:
    return query.new_empty(query.shape, dtype=autocast_dtype(query))


def _run_multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    layer = current_layer()
    before = layer.num_attentions if layer is not None else 0
    attend = _dispatch_attention
    given = _MULTI_HEAD.bind(*args, **kwargs).arguments
    # Torch would compare the masks, of the full sequence, with this rank's tokens. Extra keys are appended to them.
    if layer is not None and given.get("bias_k") is None and not given.get("add_zero_attn"):
        attend = functools.partial(_attend_with, layer, *_take_masks(given))
    torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        output = func(**given)
    finally:
        torch.nn.functional.scaled_dot_product_attention = _dense_attention
    if layer is not None and layer.num_attentions == before:
        raise ConfigError(
            "nn.MultiheadAttention was called with need_weights=True, so it does not use"
            " F.scaled_dot_product_attention, which sequence parallelism replaces: call it with need_weights=False"
        )
    return output


def _take_masks(given: dict[str, Any]) -> tuple[torch.Tensor | None, bool]:
    """Remove the masks from arguments of `F.multi_head_attention_forward`; return them as one, and if it is causal."""
    mask, padding = given.pop("attn_mask", None), given.pop("key_padding_mask", None)
    is_causal = given.pop("is_causal", False) and mask is not None
    if is_causal and padding is None:
        return None, True
    batch, dtype = given["query"].shape[1], given["query"].dtype
    found = []
    if mask is not None:
        found.append(mask.unflatten(0, (batch, -1)) if mask.dim() == 3 else mask)  # of all heads
    if padding is not None:
        found.append(padding[:, None, None])
    additive = [
        torch.zeros_like(one, dtype=dtype).masked_fill_(one, -math.inf) if one.dtype == torch.bool else one
        for one in found
    ]
    return (sum(additive[1:], additive[0]) if additive else None), False


def _attend_with(
    layer: LayerContext, full_mask: torch.Tensor | None, is_full_causal: bool, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run an attention call of torch's module, (query, key, value, mask, dropout, is_causal), with these masks."""
    if layer.is_in_attention:  # a call of sequence-parallel attention itself
        return _dispatch_attention(*args, **kwargs)
    query, key, value, _, dropout, _ = args
    return _dispatch_attention(query, key, value, full_mask, dropout, is_full_causal)


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
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    AttentionInterface.register(_EAGER, functools.partial(_attention_forward, is_eager=True))
    AttentionMaskInterface.register(_EAGER, eager_mask)
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
    is_causal = False if is_eager else is_causal
    _check_supported(module, kwargs)
    if current_layer() is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        others = kwargs if position_bias is None else {**kwargs, "position_bias": position_bias}
        dense: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
        return dense
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    rest = attention_mask, dropout, is_causal and attention_mask is None, scaling, query.shape[1] != key.shape[1]
    output: torch.Tensor = _attend_in_layer(_visible(), query, key, value, position_bias, *rest)
    return output.transpose(1, 2).contiguous(), None


def _add_bias(layer: LayerContext, bias: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool) -> torch.Tensor:
    """Return an additive mask from a position bias and a mask, which may have the rows of the full sequence."""
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.shape[-2] not in (1, bias.shape[-2]):  # the bias has this rank's rows, in attention to another sequence
        sharding = layer.sp_group.sharding_of(mask.shape[-2])
        mask = sharding.shard(mask, mask.dim() - 2, layer.sp_group.rank)
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
            "output_attentions=True requests attention weights, which no rank computes in full where sequence"
            " parallelism shards the tokens: leave it out, or use sequence_parallelism_mode='split_gather'"
        )
