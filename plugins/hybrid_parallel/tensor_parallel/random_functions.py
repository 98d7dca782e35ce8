"""Random functions in tensor-parallel regions: dropout at their ends, and functions of compiled layers.

A graph of torch.compile draws all its random numbers from the default generator, whose state is the same on all ranks,
and in an order of its own. In a region with sharded activations each rank needs others. So there, a function that draws
numbers is an operator which enters the region's RNG stream and leaves it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.core.activation_policy import RECOMPUTED
from booster.core.compiling import COMPILED, is_compiled_layer, not_compiled
from booster.core.layer_stacks import subclass_of
from booster.core.opaque_operator import opaque

from .group import TensorParallelGroup, group_of_number

_GROUP = "_random_functions_group"  # attribute of a layer


def make_dropout(module: nn.Module, tp_group: TensorParallelGroup, *, is_sharded: bool) -> None:
    """Give a dropout of a sharded input a mask of its own on every rank, one of a replicated input the same on all.

    Inside and outside of regions.
    """
    module.register_forward_pre_hook(functools.partial(_change_stream, tp_group, is_sharded))


def _change_stream(tp_group: TensorParallelGroup, is_sharded: bool, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() and tp_group.is_traceable(module.training):
        tp_group.traced_in_region = is_sharded and not tp_group.shards_sequence
    else:
        _enter_or_leave(tp_group, is_sharded, module.training)


@not_compiled
def _enter_or_leave(tp_group: TensorParallelGroup, is_sharded: bool, is_training: bool) -> None:
    if not is_training or tp_group.shards_sequence or tp_group.size == 1:
        return  # where the sequence is sharded, the stack's RNG stream is used
    if is_sharded:
        tp_group.rng.enter()
    else:
        tp_group.rng.leave()


def _named(where: Any, names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(where, name) for name in names.split() if hasattr(where, name))


# By what their arguments say about randomness: a probability and whether it is training; a probability; or always.
_ALPHA_DROPOUTS = _named(F, "alpha_dropout feature_alpha_dropout")  # by default not in training
DROPOUTS = _named(F, "dropout dropout1d dropout2d dropout3d") | _ALPHA_DROPOUTS
_ATTENTION = F.scaled_dot_product_attention
_DRAWS = _named(F, "gumbel_softmax rrelu") | _named(
    torch,
    "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout bernoulli multinomial normal poisson"
    " rand rand_like randn randn_like randint randint_like randperm",
)
_DRAWS |= _named(torch.Tensor, "bernoulli multinomial")
FILLS = _named(torch.Tensor, "bernoulli_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_")
"""Those that write their first argument."""
FEATURE_DROPOUTS = _named(F, "dropout1d dropout2d dropout3d feature_alpha_dropout")
"""Dropouts that draw one number for all elements behind the first two dimensions."""
RANDOM_FUNCTIONS = DROPOUTS | _DRAWS | FILLS
"""Functions that draw random numbers, without attention."""


def is_dropping(
    func: Any, input: torch.Tensor, p: float = 0.5, training: bool | None = None, inplace: bool = False
) -> bool:
    """Whether a call of one of `DROPOUTS` draws numbers."""
    is_training = func not in _ALPHA_DROPOUTS if training is None else training
    return is_training and p > 0


class RandomFunctionMode(TorchFunctionMode):
    """Torch function mode under which the layers of a group are traced.

    Args:
        tp_group: The tensor-parallel group.
    """

    def __init__(self, tp_group: TensorParallelGroup) -> None:
        super().__init__()
        self._tp_group = tp_group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile can trace it in a mode
        if not self._tp_group.traced_in_region or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in FILLS:
            return args[0].copy_(self._draw(fill, func, torch.empty_like(args[0]), *args[1:], **kwargs))
        if func in DROPOUTS:
            return self._drop(func, *args, **kwargs)
        if func in _DRAWS or (func is _ATTENTION and _drops_scores(*args, **kwargs)):
            return self._draw(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _drop(
        self,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not is_dropping(func, input, p, training):
            return input
        dropped: torch.Tensor = self._draw(func, input, p, True)
        return input.copy_(dropped) if inplace else dropped

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return _draw_in_region(self._tp_group.number, func, len(args), tuple(kwargs), *args, *kwargs.values())


def call_named(number: int, func: Any, num_args: int, names: tuple[str, ...], *values: Any) -> Any:
    """Call a function of a number of positional arguments, and of named ones."""
    return func(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


def _call_in_stream(number: int, *call: Any) -> Any:
    rng = group_of_number(number).rng
    rng.enter(force=True)
    try:
        return call_named(number, *call)
    finally:
        rng.leave()


_draw_in_region = opaque(_call_in_stream, call_named)


def fill(func: Any, like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a new tensor that one of `FILLS` has written."""
    return func(torch.empty_like(like), *args, **kwargs)  # type: ignore[no-any-return]


def _drops_scores(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> bool:
    return dropout_p > 0


def intercept_random_functions(model: nn.Module, layers: Iterable[nn.Module], tp_group: TensorParallelGroup) -> None:
    """Let graphs of layers draw random numbers in their regions. Classes are replaced by subclasses of the same name.

    Args:
        model: Model whose compiled modules are layers, too. It is one itself if there are none.
        layers: Layers that may be compiled later.
        tp_group: The tensor-parallel group.

    Collective: no.
    """
    compiled = [one for one in model.modules() if is_compiled_layer(one) or one._compiled_call_impl is not None]
    for layer in dict.fromkeys([*compiled, *layers]) or [model]:
        layer.__dict__[_GROUP] = tp_group
        layer.__class__ = subclass_of(type(layer), "drawing", _members, below=COMPILED | RECOMPUTED)


def _members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tp_group: TensorParallelGroup = self.__dict__[_GROUP]
        if not (torch.compiler.is_compiling() and self.training) or tp_group.intercepts_random:
            return base.forward(self, *args, **kwargs)
        _show_to_modes()
        tp_group.intercepts_random = True
        with RandomFunctionMode(tp_group):
            output = base.forward(self, *args, **kwargs)
        tp_group.intercepts_random = False
        return output

    return {"forward": forward}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _show_to_modes() -> None:
    """Let torch.compile call modes for all functions of `_DRAWS`; it leaves out `rand_like` and similar ones."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(_DRAWS)
