"""Functions that a graph of torch.compile contains as one operator, which runs them eagerly.

The compiler traces neither the function nor its gradient. A function that communicates, reads state that changes
between calls or draws from a generator of its own thus ends no graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

# Note [Opaque operators]
# The operator `booster::opaque` runs the function as a small autograd graph of its own, on detached inputs, and
# `booster::opaque_backward` runs the backward of that graph. The graph belongs to a tensor that the first operator
# returns beside the outputs, its ticket. The compiler saves the ticket for backward, and where activation checkpointing
# drops saved tensors, the graph goes with it. What else an operator needs is a `_Call`, which it finds by a key: the
# key describes the call, so that caches of compiled graphs tell calls apart, and ends with a number, so that equal
# calls are not merged into one.

Shapes = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call in a graph consists of, besides tensors.

    Attributes:
        function: The function.
        shapes: Function that returns its outputs for fake tensors.
        arguments: Its arguments, with None for each tensor.
        is_tensor: Whether each argument is a tensor.
        needs_grad: Whether each tensor needs a gradient.
        metadata: Dtype and device of the tensors that do.
        autocast: Device type, dtype, and whether autocast is enabled.
    """

    function: Callable[..., Any]
    shapes: Shapes
    arguments: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    needs_grad: tuple[bool, ...]
    metadata: tuple[tuple[torch.dtype, torch.device], ...]
    autocast: tuple[str, torch.dtype, bool]

    def run(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Call a function with these arguments and tensors; return its outputs."""
        remaining = iter(tensors)
        kind, dtype, is_enabled = self.autocast
        pairs = zip(self.arguments, self.is_tensor, strict=True)
        with torch.autocast(kind, dtype=dtype, enabled=is_enabled):
            outputs = function(*(next(remaining) if is_tensor else one for one, is_tensor in pairs))
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


_TICKET = "_opaque_graph"  # attribute of a ticket: gradient edges of the inputs and outputs, None for those without a gradient
_calls: dict[str, _Call] = {}
_numbers = itertools.count()
_Key = torch._C.DispatchKey
_AUTOGRAD_KEYS = (_Key.AutogradFunctionality, _Key.AutogradOther, _Key.AutogradNestedTensor, _Key.ADInplaceOrView)


def opaque(function: Callable[..., Any], shapes: Shapes) -> Callable[..., Any]:
    """Return a function that graphs of torch.compile contain as one operator; see Note [Opaque operators].

    Args:
        function: Function of tensors and of values that stay the same for a graph, all by position. It returns a tensor
            or several, does not change its arguments, and uses no other tensor that needs a gradient.
        shapes: Function of the same arguments that returns tensors of the outputs' shapes, dtypes and devices.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args)
        return call_in_graph(function, shapes, *args)

    return call


def call_in_graph(function: Callable[..., Any], shapes: Shapes, *args: Any) -> Any:
    """Call a function as one operator of the graph that is being traced; see `opaque`."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    is_tensor = tuple(isinstance(one, torch.Tensor) for one in args)
    arguments = tuple(None if isinstance(one, torch.Tensor) else one for one in args)
    needs_grad = tuple(torch.is_grad_enabled() and one.requires_grad for one in tensors)
    metadata = tuple((one.dtype, one.device) for one, needs in zip(tensors, needs_grad, strict=True) if needs)
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    key = _register(function, shapes, arguments, is_tensor, needs_grad, metadata, autocast)
    *outputs, _ = torch.ops.booster.opaque(tensors, key)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@torch.compiler.assume_constant_result
def _register(function: Callable[..., Any], *parts: Any) -> str:
    """Return the key of a new call, which the graph contains as a constant."""
    call = _Call(function, *parts)
    arguments = ", ".join(getattr(one, "__qualname__", repr(one)) for one in call.arguments)
    key = f"{function.__qualname__}({arguments}) {call.needs_grad} {call.metadata} {call.autocast} {next(_numbers)}"
    _calls[key] = call
    return key


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.key = inputs
    ctx.ticket = output[-1]
    needing = (one for one, needs in zip(tensors, _calls[ctx.key].needs_grad, strict=True) if needs)
    ctx.sizes = [size for one in needing for size in (one.dim(), *one.shape)]


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None]:
    found = iter(torch.ops.booster.opaque_backward(grads[:-1], ctx.ticket, ctx.sizes, ctx.key))
    return [next(found) if needs else None for needs in _calls[ctx.key].needs_grad], None


@torch.library.custom_op("booster::opaque", mutates_args=())
def _forward(tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    """Run a function on detached tensors; return its outputs and the ticket of its graph."""
    call = _calls[key]
    saved = _SavedTensors(_storage(one) for one in tensors if not isinstance(one, nn.Parameter))
    with _autograd_of_its_own(any(call.needs_grad), saved):
        anchor = torch.zeros((), requires_grad=True)
        pairs = zip(tensors, call.needs_grad, strict=True)
        inputs = [_Input.apply(one, anchor) if needs else one.detach() for one, needs in pairs]  # type: ignore[no-untyped-call]
        outputs = call.run(call.function, inputs)
        edges = _edges(inputs), _edges(outputs)
    ticket = torch.zeros((), dtype=torch.int64)
    setattr(ticket, _TICKET, edges)
    used = {_storage(one) for one in tensors} | saved.storages
    return [*(_own(one.detach(), used) for one in outputs), ticket]


@_forward.register_fake
def _(tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    outputs = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in call.run(call.shapes, tensors))
    return [*outputs, torch.empty((), dtype=torch.int64, device="cpu")]


@torch.library.custom_op("booster::opaque_backward", mutates_args=())
def _backward(
    grads: list[torch.Tensor | None], ticket: torch.Tensor, sizes: list[int], key: str
) -> list[torch.Tensor]:
    """Return the gradients of the tensors that need one, zeros for those that no output depends on."""
    inputs, outputs = getattr(ticket, _TICKET)
    pairs = [(end, grad) for end, grad in zip(outputs, grads, strict=True) if end is not None and grad is not None]
    wanted = [one for one in inputs if one is not None]
    found: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if pairs:
        ends, of_ends = zip(*pairs, strict=True)
        # The graph stays for another backward through the compiled one, and goes with its ticket.
        found = torch.autograd.grad(ends, wanted, of_ends, retain_graph=True, allow_unused=True)
    used = {_storage(one) for one in grads if one is not None}
    made = []
    for grad, missing in zip(found, _empty_gradients(sizes, key), strict=True):
        made.append(missing().zero_() if grad is None else _own(grad, used))
        used.add(_storage(made[-1]))
    return made


@_backward.register_fake
def _(grads: list[torch.Tensor | None], ticket: torch.Tensor, sizes: list[int], key: str) -> list[torch.Tensor]:
    return [make() for make in _empty_gradients(sizes, key)]


def _empty_gradients(sizes: Sequence[int], key: str) -> Iterator[Callable[[], torch.Tensor]]:
    """Yield a function for each gradient that allocates it."""
    remaining = iter(sizes)
    for dtype, device in _calls[key].metadata:
        shape = [next(remaining) for _ in range(next(remaining))]
        yield functools.partial(torch.empty, shape, dtype=dtype, device=device)


_forward.register_autograd(_differentiate, setup_context=_setup)


class _Input(torch.autograd.Function):
    """An input of a graph, which the graph does not keep as it would a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("the gradient of an input is read here")


def _edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(one) if one.requires_grad else None for one in tensors]


class _SavedTensors:
    """Saved tensors of a graph, which must not be in the memory of other tensors: compiled code overwrites these.

    Args:
        others: Storages of other tensors.

    Attributes:
        storages: Storages of the saved tensors.
    """

    def __init__(self, others: Iterable[int]) -> None:
        self._others = set(others)
        self.storages: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor to save."""
        tensor = tensor.clone() if _storage(tensor) in self._others else tensor
        self.storages.add(_storage(tensor))
        return tensor


@contextmanager
def _autograd_of_its_own(is_enabled: bool, saved: _SavedTensors) -> Iterator[None]:
    """Context in which autograd works as outside of operators, and saves tensors itself."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack),
        torch.set_grad_enabled(is_enabled),
    ):
        yield


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(tensor: torch.Tensor, used: set[int]) -> torch.Tensor:
    """Return a contiguous tensor of its own memory, as outputs of operators must be."""
    if tensor.is_contiguous() and _storage(tensor) not in used:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
