"""Stacks of layers that run on blocks of activations."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.layer_context import is_in_backward
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import hidden_key, map_hidden
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import (
    CapturedOutputs,
    captured_lists,
    mark_sharded,
)

from .grid import TensorGrid, assemble, divide, own_examples

_is_in_backward = torch.compiler.assume_constant_result(is_in_backward)  # in a graph, of when it is traced

# Note [Arguments of layers]
# Besides hidden states layers get arguments that all ranks hold: attention masks, positions, rotary embeddings. Most of
# them are used between the two linear layers of a pair. So the module that contains a pair's first layer, such as an
# attention, takes its examples of them. In the modes "2d" and "2.5d" these are those of the layer, which takes them
# first, for its own code. In the mode "3d" they differ, and arguments that a layer's own code reads are an error. They
# have the examples in their first dimension; where it is 1, or there is no other dimension, they are the same for all
# examples.


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
        layer.register_forward_pre_hook(partial(stack.pre_forward, index), with_kwargs=True)
        layer.register_forward_hook(partial(stack.post_forward, index, index == len(layers) - 1))


def take_own_examples(module: nn.Module, grid: TensorGrid, heads: Mapping[str, int]) -> None:
    """Let a layer, or a module with the first layers of pairs, take its examples of its arguments; see the Note.

    Args:
        module: The module.
        grid: The grid.
        heads: Number of heads of a rank, by the names of arguments whose first dimension is (examples, heads).

    Collective: no; backward is, where arguments have gradients.
    """
    names = list(inspect.signature(module.forward).parameters)
    module.register_forward_pre_hook(_ArgumentHook(grid, names, heads), with_kwargs=True)


@dataclass(slots=True)
class _StackForward:
    """A running forward of a stack.

    Attributes:
        captured: What hooks of transformers capture.
        num_examples: Number of this rank's examples.
        num_layers: Number of layers that have run: all up to one.
        output: Hidden states that the last one returned, if they are known.
        version: Their version, which changes when they are written.
    """

    captured: CapturedOutputs
    num_examples: int
    num_layers: int = 0
    output: torch.Tensor | None = None
    version: int = 0


class _GridStack:
    """Hooks of the layers of a stack.

    Each layer draws from this rank's stream of random numbers. Between layers all ranks draw the same numbers, as a
    model decides there which layers it runs.
    """

    def __init__(self, grid: TensorGrid) -> None:
        self._grid = grid
        self._forward: _StackForward | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _GridStack:
        return self

    @not_compiled
    def pre_forward(
        self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        key = hidden_key(args, kwargs)
        hidden = kwargs[key] if isinstance(key, str) else args[key]
        if index == 0:
            hidden = self._begin(hidden, (*args, *kwargs.values()))
        elif not is_in_backward():
            self._check_input(index, hidden)
        if module.training:
            self._grid.tp_group.rng.enter(force=True)
        if isinstance(key, str):
            return args, {**kwargs, key: hidden}
        return (*args[:key], hidden, *args[key + 1 :]), kwargs

    @not_compiled
    def post_forward(self, index: int, is_last: bool, module: nn.Module, args: Any, output: Any) -> Any:
        if module.training:
            self._grid.tp_group.rng.leave()
        if self._forward is not None and not is_in_backward():
            self._note_output(self._forward, index, output)
        if is_last:
            return self._end(output)
        if not is_in_backward():
            mark_sharded(output, self._assemble)
        return None

    def _begin(self, hidden: torch.Tensor, arguments: Iterable[Any]) -> torch.Tensor:
        for value in arguments:
            _refuse_reordering(value, self._grid)
        if not is_in_backward() and any("attentions" in name for name in captured_lists()):
            raise ConfigError(
                f"output_attentions=True requests attention weights, of which tp_mode={self._grid.shape.mode!r} gives"
                " each rank those of its own heads and examples: leave it out, also in the config"
            )
        block = divide(hidden, self._grid)
        if not is_in_backward():
            self._forward = _StackForward(CapturedOutputs(sees_all_tokens=True), block.shape[0])
        return block

    def _end(self, output: Any) -> Any:
        forward = None if is_in_backward() else self._forward

        def assemble_hidden(x: torch.Tensor) -> torch.Tensor:
            if forward is not None:
                forward.captured.gather(x.shape, lambda one, dim: self._assemble(one))
            return self._assemble(x)

        full = map_hidden(output, assemble_hidden)
        if forward is not None:
            self._forward = None
        return full

    def _note_output(self, forward: _StackForward, index: int, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, torch.Tensor) and first.shape[:1] != (forward.num_examples,):
            raise ConfigError(
                f"layer {index} of a stack returned hidden states of shape {tuple(first.shape)} for"
                f" {forward.num_examples} examples, of which tp_mode={self._grid.shape.mode!r} gives each rank its own:"
                " an argument of the layer that has all examples can be read in the module of a pair of linear layers"
                " only. Pass it to such a module, or use tp_mode='2d' or '1d'"
            )
        forward.num_layers = max(forward.num_layers, index + 1)
        forward.output = first if isinstance(first, torch.Tensor) else None
        forward.version = 0 if forward.output is None or forward.output.is_inference() else forward.output._version

    def _check_input(self, index: int, hidden: torch.Tensor) -> None:
        """Check that the layers before this one have run, and that it gets what the last one has returned."""
        forward, mode = self._forward, self._grid.shape.mode
        if forward is None or forward.num_layers < index:
            raise ConfigError(
                f"layer {index} of a stack ran without the layers before it, but tp_mode={mode!r} divides hidden states"
                " at the first one and assembles them behind the last one: do not drop or call single layers"
                " (layerdrop=0), or use tp_mode='1d'"
            )
        known, forward.output = forward.output, None
        if known is None:
            return
        version = 0 if known.is_inference() else known._version
        if hidden is not known or version != forward.version:
            raise ConfigError(
                f"layer {index} of a stack got other hidden states than the layer before it has returned, so that the"
                f" model's forward computes between layers, where tp_mode={mode!r} gives each rank a block of them,"
                f" here of shape {tuple(known.shape)}: compute it in the layers, before the first or after the last"
                " one, or use tp_mode='1d'"
            )

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
