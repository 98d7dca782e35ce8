"""Stacks of layers that run on blocks of activations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.layer_context import is_in_backward
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import hidden_key, map_hidden
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import CapturedOutputs, mark_sharded

from .grid import TensorGrid, assemble, divide, own_examples

_is_in_backward = torch.compiler.assume_constant_result(is_in_backward)  # in a graph, of when it is traced

# Note [Arguments of layers]
# Besides hidden states layers get arguments that all ranks hold: attention masks, positions, rotary embeddings. Most of
# them are used between the two linear layers of a pair. So the module that contains a pair's first layer, such as an
# attention, takes its examples of them. They have the examples in their first dimension; where it is 1, or there is no
# other dimension, they are the same for all examples.


def attach_grid_stack(layers: Sequence[nn.Module], grid: TensorGrid) -> None:
    """Make consecutive layers run on blocks of activations: hooks divide the hidden states, and assemble them after.

    Args:
        layers: Layers in execution order. Their hidden states (batch, ..., features) are the first positional argument
            or `hidden_states`, and the output or the first element of a tuple.
        grid: The grid.

    Collective: no; the layers' calls are.
    """
    stack = _GridStack(grid)
    for index, layer in enumerate(layers):
        if index == 0:
            layer.register_forward_pre_hook(stack.begin, with_kwargs=True)
        layer.register_forward_hook(stack.end if index == len(layers) - 1 else stack.mark)


def take_own_examples(module: nn.Module, grid: TensorGrid, heads: Mapping[str, int]) -> None:
    """Let a module that contains the first layers of pairs take its examples of its arguments; see the Note.

    Args:
        module: The module.
        grid: The grid.
        heads: Number of heads of a rank, by the names of arguments whose first dimension is (examples, heads).

    Collective: no; backward is, where arguments have gradients.
    """
    names = list(inspect.signature(module.forward).parameters)
    module.register_forward_pre_hook(_ArgumentHook(grid, names, heads), with_kwargs=True)


class _GridStack:
    def __init__(self, grid: TensorGrid) -> None:
        self._grid = grid
        self._captured: CapturedOutputs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _GridStack:
        return self

    @not_compiled
    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        key = hidden_key(args, kwargs)
        hidden = kwargs[key] if isinstance(key, str) else args[key]
        for value in (*args, *kwargs.values()):
            _refuse_reordering(value, self._grid)
        if not is_in_backward():
            self._captured = CapturedOutputs(sees_all_tokens=False)
        if module.training:
            self._grid.tp_group.rng.enter(force=True)
        block = divide(hidden, self._grid)
        if isinstance(key, str):
            return args, {**kwargs, key: block}
        return (*args[:key], block, *args[key + 1 :]), kwargs

    @not_compiled
    def mark(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            mark_sharded(output, self._assemble)

    @not_compiled
    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        captured, self._captured = self._captured, None

        def assemble_hidden(x: torch.Tensor) -> torch.Tensor:
            if captured is not None and not is_in_backward():
                captured.gather(x.shape, lambda one, dim: self._assemble(one))
            return self._assemble(x)

        full = map_hidden(output, assemble_hidden)
        if module.training:
            self._grid.tp_group.rng.leave()
        return full

    def _assemble(self, block: torch.Tensor) -> torch.Tensor:
        return assemble(block, self._grid)


def _refuse_reordering(cache: Any, grid: TensorGrid) -> None:
    """Make a cache of keys and values refuse beam search, which exchanges examples, of which each rank has its own."""
    if not hasattr(cache, "reorder_cache"):
        return

    def reorder_cache(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"beam search exchanges the cached keys and values of examples, which tp_mode={grid.shape.mode!r} divides"
            " over ranks: generate without beams, or use tp_mode='1d'"
        )

    cache.reorder_cache = reorder_cache


class _ArgumentHook:
    def __init__(self, grid: TensorGrid, names: Sequence[str], heads: Mapping[str, int]) -> None:
        self._grid = grid
        self._names = names
        self._heads = heads

    def __deepcopy__(self, memo: dict[int, Any]) -> _ArgumentHook:
        return self

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not args and not kwargs:
            return args, kwargs
        key = hidden_key(args, kwargs)
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        hidden = named[key]
        for one in named:
            if one == key:
                continue
            num_heads = self._heads.get(one if isinstance(one, str) else self._names[one])
            if num_heads is not None and named[one].dim() == 3:
                named[one] = self._own(named[one].unflatten(0, (-1, num_heads)), hidden, module).flatten(0, 1)
            else:
                named[one] = self._own_of(named[one], hidden, module)
        return tuple(named.pop(position) for position in range(len(args))), named

    def _own_of(self, value: Any, hidden: torch.Tensor, module: nn.Module) -> Any:
        """Return an argument that is a tensor or contains some; torch.compile can't trace torch's pytrees here."""
        if isinstance(value, torch.Tensor):
            return self._own(value, hidden, module)
        if type(value) in (tuple, list):
            return type(value)([self._own_of(one, hidden, module) for one in value])
        return value

    def _own(self, x: torch.Tensor, hidden: torch.Tensor, module: nn.Module) -> torch.Tensor:
        grid, shape = self._grid, self._grid.shape
        if x.dim() < 2 or x.shape[0] == hidden.shape[0] or not self._has_all_examples(x, hidden):
            return x
        if x.dim() == hidden.dim() > 2 and x.is_floating_point() and x.shape[-1] == hidden.shape[-1] * grid.side:
            return divide(x, grid)  # the output of another stack, which attention reads
        if x.dim() == 2 and x.shape[0] == x.shape[1] and x.dtype != torch.long:
            raise ConfigError(
                f"a {type(module).__name__} got an argument of shape {tuple(x.shape)} with as many tokens as examples,"
                f" so that tp_mode={shape.mode!r} can't know which of its dimensions are examples: add a dimension for"
                " heads, or use another batch size"
            )
        return own_examples(x, grid)

    def _has_all_examples(self, x: torch.Tensor, hidden: torch.Tensor) -> bool:
        """Whether the first dimension is that of all examples. A layer may be computed again after another batch."""
        num_examples, num_local = x.shape[0], hidden.shape[0]
        if num_examples == self._grid.num_examples(num_local):
            return True
        return self._grid.num_local.get(num_examples) == num_local and _is_in_backward()
