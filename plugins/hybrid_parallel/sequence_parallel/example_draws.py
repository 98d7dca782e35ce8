"""Random numbers that layers draw for whole examples, which are the same on all ranks that hold their tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from booster.core.opaque_operator import call_in_graph
from booster.plugins.hybrid_parallel.tensor_parallel.random_functions import (
    DROPOUTS,
    FILLS,
    RANDOM_FUNCTIONS,
    fill,
    is_dropping,
)

from .layer_context import current_layer

# Note [Numbers of examples]
# In a layer of a stack each rank draws from a stream of its own, as dropout masks of different tokens differ. A number
# that holds for all tokens of an example, such as whether stochastic depth drops it, must be the same on all ranks. Its
# shape tells: (examples, 1, 1), (examples,), or one number for all. Those are drawn from a stream that the ranks share.


class ExampleDrawMode(TorchFunctionMode):
    """Torch function mode of a running layer whose hidden states are sharded over tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile can trace it in a mode
        return call_drawing(func, args, kwargs or {})


def call_drawing(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function; numbers that it draws for whole examples are the same on all ranks."""
    if func not in RANDOM_FUNCTIONS or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    given = _given(args, kwargs)
    if given is None:  # the shape is that of what it returns
        drawn = func(*args, **kwargs)
        if not _may_be_of_examples(drawn.shape):
            return drawn
    elif not _may_be_of_examples(given.shape) or (func in DROPOUTS and not is_dropping(func, *args, **kwargs)):
        return func(*args, **kwargs)
    if not torch.compiler.is_compiling():
        return _draw(func, len(args), tuple(kwargs), *args, *kwargs.values())
    is_in_place = kwargs.pop("inplace", False)
    if func in FILLS:
        return args[0].copy_(_draw_in_graph(fill, func, *args, **kwargs))
    drawn = _draw_in_graph(func, *args, **kwargs)
    return args[0].copy_(drawn) if is_in_place else drawn


def _given(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    given = args[0] if args else kwargs.get("input")
    return given if isinstance(given, torch.Tensor) else None


def _may_be_of_examples(shape: torch.Size) -> bool:
    return all(size == 1 for size in shape[1:]) or (len(shape) > 2 and shape[1] == 1)


def _draw_in_graph(func: Any, *args: Any, **kwargs: Any) -> Any:
    return call_in_graph(_draw, _call, func, len(args), tuple(kwargs), *args, *kwargs.values())


def _draw(func: Any, num_args: int, names: tuple[str, ...], *values: Any) -> Any:
    def call() -> Any:
        return _call(func, num_args, names, *values)

    layer = current_layer()
    if layer is None or layer.is_in_attention or not layer.stack.splitter.rng.is_entered:
        return call()
    given = next((one for one in values if isinstance(one, torch.Tensor)), None)
    if not layer.stack.is_of_examples((call() if given is None else given).shape):
        return call()
    layer.stack.splitter.rng.share()
    try:
        return call()
    finally:
        layer.stack.splitter.rng.enter()


def _call(func: Any, num_args: int, names: tuple[str, ...], *values: Any) -> Any:
    return func(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
