"""torch.compile: functions that it must not trace, and compilation of a model's layers."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from booster.errors import ConfigError
from booster.pytree import map_first

from .activation_policy import BY_OPERATION, COMPILED_BY_OPERATION, WHOLE_LAYERS, policy_of
from .layer_stacks import layers_of, subclass_of
from .opaque_operator import bind_handle, has_opaque_methods

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMPILED = "compiled"
COMPILED = frozenset({_COMPILED, COMPILED_BY_OPERATION})
"""Purposes of the subclasses of compiled layers. What must be traced is below them."""
_IS_ENABLED = "_is_compilation_enabled"
_SKIPS = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # a setting of torch._dynamo

# Attribute of a model with the compiled layer of each module inside of one; the layers themselves are left out. Hooks
# of these modules run in the graph, so that what they prepare must be prepared by a hook of the layer.
LAYER_OF_COMPILED = "_layer_of_compiled_modules"

# Attribute of a compiled layer with a function that is called before activation checkpointing runs its graph again,
# which is below the hooks of the layer.
BEFORE_RECOMPUTATION = "_before_recomputation"


def not_compiled(function: _Function) -> _Function:
    """Exclude a function and all functions that it calls from torch.compile.

    Required for functions that communicate or keep state between calls, because a compiled graph replays neither.
    """
    return cast(_Function, torch.compiler.disable(function))


def calls_compiled(function: _Function) -> _Function:
    """Exclude a function from torch.compile, but not the functions that it calls."""
    return cast(_Function, torch.compiler.disable(function, recursive=False))


class EagerHook:
    """Hook that does nothing in a graph, for modules inside of compiled layers. A copied model copies the hook."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else self.hook(*args, **kwargs)


# Note [Compiled layers]
# What is compiled is the forward of each layer of a stack, not its call. Hooks of the layer, in which plugins gather
# weights and shard hidden states, run outside of the graph, and so do pipelines and the parts of the model between the
# layers. Equal layers share one graph: the compiled function is that of their class. It is replaced before plugins
# configure the model, so that classes which plugins derive from it call it; until boost() ends, it runs eagerly,
# because plugins run layers on fake tensors to find their shapes.


def parse_compile_options(given: bool | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the keyword arguments for `torch.compile` of an argument `compile`, or None if nothing is compiled.

    Args:
        given: True for torch's defaults, a dict of keyword arguments, or False or None.

    Raises:
        ConfigError: torch.compile does not take the arguments.
    """
    if given is None or given is False:
        return None
    options = {} if given is True else given
    known = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")]
    if not isinstance(options, Mapping) or not set(options) <= set(known):
        raise ConfigError(
            f"Booster(compile={given!r}) is not a setting of torch.compile: give True, or a dict with some of"
            f" {', '.join(known)}, such as dict(mode='max-autotune')"
        )
    try:
        torch.compile(_identity, **options)
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"Booster(compile={given!r}): torch.compile refuses it ({text}): change the setting, or give True for its"
            " defaults"
        ) from error
    return dict(options)


def compile_layers(model: nn.Module, options: Mapping[str, Any]) -> Callable[[], None]:
    """Prepare the compilation of the layers of all stacks, or of the entire forward if the model has no stack.

    Args:
        model: The user's model; its layers' classes are replaced by subclasses of the same name.
        options: Keyword arguments for `torch.compile`.

    Returns:
        A function that enables it; until then layers run eagerly.

    Collective: no.
    """
    layers = list(layers_of(model).values()) or [model]
    for module in model.modules():
        if has_opaque_methods(type(module)):  # type: ignore[arg-type]
            bind_handle(module)
    text = repr(sorted(options.items()))
    for layer in layers:
        if not is_compiled_layer(layer):
            policy = policy_of(layer)
            is_above = policy is not None and policy.purpose == BY_OPERATION
            purpose = COMPILED_BY_OPERATION if is_above else _COMPILED
            make = partial(_compiled_members, options=options, recomputes=is_above)
            layer.__class__ = subclass_of(type(layer), purpose, make, settings=text, below={WHOLE_LAYERS})
    if layers != [model]:
        inner = {one: layer for layer in layers for one in layer.modules() if one is not layer}
        model.__dict__[LAYER_OF_COMPILED] = inner

    def enable() -> None:
        for layer in layers:
            layer.__dict__[_IS_ENABLED] = True

    return enable


def is_compiled_layer(module: nn.Module) -> bool:
    """Whether a module's forward is one that `compile_layers` has prepared."""
    return hasattr(type(module), _IS_ENABLED)


def _compiled_members(base: type[nn.Module], options: Mapping[str, Any], recomputes: bool) -> dict[str, Any]:
    # With selected operations the layer must be one graph: torch.compile leaves them out of others.
    compiled = torch.compile(base.forward, **{**options, "fullgraph": True} if recomputes else options)
    dynamo: Any = torch._dynamo  # type: ignore[attr-defined]
    # What a forward stores, as in `TensorParallelGroup.traced_copy`, needs no repetition in backward.
    settings = {_SKIPS: True} if hasattr(dynamo.config, _SKIPS) else {}

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, _IS_ENABLED):
            return base.forward(self, *args, **kwargs)
        prepare = vars(self).get(BEFORE_RECOMPUTATION)
        if prepare is not None and torch._C._current_graph_task_id() != -1:
            prepare()
        if not recomputes:
            return _run(compiled, self, args, kwargs)
        try:
            with dynamo.config.patch(settings):
                return _run(compiled, self, args, kwargs)
        except dynamo.exc.Unsupported as error:
            raise ConfigError(
                "checkpoint_activations(policy='selective') and Booster(compile=...) together need layers that are one"
                f" graph, and a {base.__name__} is not: write policy='layers' or 'budget', or leave compile out."
                f" {error}"
            ) from error

    return {"forward": forward, _IS_ENABLED: False}


class _Attached(threading.local):
    """What the graph that runs in this thread attaches to its output: functions of a tensor and an output."""

    pairs: list[tuple[Callable[..., torch.Tensor], torch.Tensor]] | None = None


_attached = _Attached()


def attach_to_output(function: Callable[..., torch.Tensor], value: torch.Tensor) -> bool:
    """Attach a tensor to the output of the layer whose graph is being traced, by a function that a graph can't hold.

    Args:
        function: Function of the tensor and an output of the layer, which returns the output.
        value: The tensor.

    Returns:
        False if no layer of `compile_layers` is traced, and nothing was done.
    """
    if _attached.pairs is None:
        return False
    _attached.pairs.append((function, value))
    return True


def _run(compiled: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> Any:
    before, _attached.pairs = _attached.pairs, []
    try:
        output = compiled(layer, *args, **kwargs)
        for function, value in _attached.pairs:
            if torch.is_grad_enabled():
                output = map_first(output, partial(function, value))
            else:
                function(value, value)  # without a graph there is nothing to attach to, but a checkpoint may run
    finally:
        _attached.pairs = before
    return output


def _identity(x: Any) -> Any:
    return x
