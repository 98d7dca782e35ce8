"""Functions that a graph of torch.compile contains as one operator, which runs them eagerly.

The compiler traces neither the function nor its gradient. A function that communicates, reads state that changes
between calls or draws from a generator of its own thus ends no graph.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

# Note [Opaque operators]
# The operator `booster::opaque` runs the function as a small autograd graph of its own, on detached inputs, and
# `booster::opaque_backward` runs the backward of that graph. The graph belongs to the memory of a tensor that the first
# operator returns beside the outputs, its handle. The compiler saves the handle for backward, and where activation
# checkpointing drops saved tensors, the graph goes with it. Parameters are saved beside the handle, and not by the
# graph, as plugins move them between forward and backward. What else an operator needs is a `_Call`, which it finds by
# a key: the key describes the call, so that caches of compiled graphs tell calls apart, and ends with a number, so that
# equal calls are not merged into one.

Shapes = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call in a graph consists of, besides tensors and integers, which a graph may have symbols for.

    Attributes:
        function: The function.
        shapes: Function that returns its outputs for fake tensors.
        arguments: Its arguments, with None for each tensor and integer.
        kinds: Whether each argument is a parameter, another tensor, an integer, or another value.
        needs_grad: Whether each tensor needs a gradient.
        metadata: Dtype and device of the tensors that do.
        autocast: Device type, dtype, and whether autocast is enabled.
    """

    function: Callable[..., Any]
    shapes: Shapes
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]
    needs_grad: tuple[bool, ...]
    metadata: tuple[tuple[torch.dtype, torch.device], ...]
    autocast: tuple[str, torch.dtype, bool]

    def parameters(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kinds = (kind for kind in self.kinds if kind in (_PARAMETER, _TENSOR))
        return [one for one, kind in zip(tensors, kinds, strict=True) if kind == _PARAMETER]

    def run(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], integers: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Call a function with these arguments, tensors and integers; return its outputs."""
        given = iter(tensors)
        remaining: dict[str, Iterator[Any]] = {_PARAMETER: given, _TENSOR: given, _INTEGER: iter(integers)}
        pairs = zip(self.kinds, self.arguments, strict=True)
        device_type, dtype, is_enabled = self.autocast
        with torch.autocast(device_type, dtype=dtype, enabled=is_enabled):
            outputs = function(*(next(remaining[kind]) if kind in remaining else one for kind, one in pairs))
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


_PARAMETER, _TENSOR, _INTEGER, _VALUE = "parameter", "tensor", "integer", "value"
_GRAPH = "_opaque_graph"  # attribute of the storage of a graph's handle
# A replayed CUDA graph would leave out what the function does on the host.
_TAGS = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
_calls: dict[str, _Call] = {}
_numbers = itertools.count()
_HANDLE = "_opaque_handle"  # attribute of a module
_IS_METHOD = "_is_opaque_method"
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
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


def opaque_method(function: Callable[..., Any], shapes: Shapes) -> Callable[..., Any]:
    """Return a method of a module that graphs of torch.compile contain as one operator, as `opaque`.

    The method may use the parameters of the module. Layers whose graph is the same share it, so that the graph gets the
    number of the module as a tensor. A module without a number, such as a copy, ends the graph.

    Args:
        function: Function of the module, and of arguments as those of `opaque`.
        shapes: Function of these arguments without the module.
    """
    outside = cast(Callable[..., Any], torch.compiler.disable(function))

    @functools.wraps(function)
    def call(self: nn.Module, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(self, *args)
        handle: ModuleHandle | None = getattr(self, _HANDLE, None)
        if handle is None or handle.number is None:
            return outside(self, *args)
        parameters = list(self.parameters())
        call = function, shapes, len(parameters), handle.number
        return call_in_graph(_call_method, _method_shapes, *call, *parameters, *args)

    setattr(call, _IS_METHOD, True)
    return call


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which operations that autocast casts compute with a tensor, for `shapes`."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else x.dtype


@functools.cache
def has_opaque_methods(kind: type[nn.Module]) -> bool:
    return any(hasattr(value, _IS_METHOD) for base in kind.__mro__ for value in vars(base).values())


class ModuleHandle:
    """Number of a module, by which operators find it. A copied module gets an empty one.

    Attributes:
        number: The number as a tensor, None for none.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHandle, ()


def bind_handle(module: nn.Module) -> None:
    """Give a module the number that its opaque methods need, unless it has one."""
    handle = module.__dict__.setdefault(_HANDLE, ModuleHandle())
    if handle.number is None:
        number = next(_numbers)
        handle.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _modules[number] = module


class _Method(nn.Module):
    """A module whose forward is a method of another one."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.module, *args)


def _call_method(
    function: Callable[..., Any], shapes: Shapes, num_parameters: int, number: torch.Tensor, *rest: Any
) -> Any:
    module = _modules[int(number)]
    names = (f"module.{name}" for name, _ in module.named_parameters())
    parameters = dict(zip(names, rest[:num_parameters], strict=True))
    return torch.func.functional_call(_Method(module, function), parameters, rest[num_parameters:])


def _method_shapes(
    function: Callable[..., Any], shapes: Shapes, num_parameters: int, number: torch.Tensor, *rest: Any
) -> Any:
    return shapes(*rest[num_parameters:])


def call_in_graph(function: Callable[..., Any], shapes: Shapes, *args: Any) -> Any:
    """Call a function as one operator of the graph that is being traced; see `opaque`."""
    kinds = tuple(_kind(one) for one in args)
    tensors = [one for one in args if _kind(one) in (_PARAMETER, _TENSOR)]
    integers = [one for one in args if _kind(one) == _INTEGER]
    arguments = tuple(one if _kind(one) == _VALUE else None for one in args)
    needs_grad = tuple(torch.is_grad_enabled() and one.requires_grad for one in tensors)
    metadata = tuple((one.dtype, one.device) for one, needs in zip(tensors, needs_grad, strict=True) if needs)
    device_type = tensors[-1].device.type if tensors else "cpu"
    autocast = device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    key = _register(function, shapes, arguments, kinds, needs_grad, metadata, autocast)
    *outputs, _ = torch.ops.booster.opaque(tensors, integers, key)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _kind(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _PARAMETER if isinstance(argument, nn.Parameter) else _TENSOR
    return _INTEGER if isinstance(argument, int) and not isinstance(argument, bool) else _VALUE


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _register(function: Callable[..., Any], *parts: Any) -> str:
    """Return the key of a new call, which the graph contains as a constant."""
    call = _Call(function, *parts)
    arguments = ", ".join(getattr(one, "__qualname__", repr(one)) for one in call.arguments)
    key = f"{function.__qualname__}({arguments}) {call.needs_grad} {call.metadata} {call.autocast} {next(_numbers)}"
    _calls[key] = call
    return key


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, integers, ctx.key = inputs
    call = _calls[ctx.key]
    ctx.of_integers = None if integers else []  # an empty list is one of no tensors
    ctx.handle = output[-1]
    needing = (one for one, needs in zip(tensors, call.needs_grad, strict=True) if needs)
    ctx.sizes = [size for one in needing for size in (one.dim(), *one.shape)]
    ctx.save_for_backward(*call.parameters(tensors))


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    parameters = list(ctx.saved_tensors)
    found = iter(torch.ops.booster.opaque_backward(grads[:-1], parameters, ctx.handle, ctx.sizes, ctx.key))
    return [next(found) if needs else None for needs in _calls[ctx.key].needs_grad], ctx.of_integers, None


@torch.library.custom_op("booster::opaque", mutates_args=(), tags=_TAGS)
def _forward(tensors: list[torch.Tensor], integers: list[int], key: str) -> list[torch.Tensor]:
    """Run a function on detached tensors; return its outputs and the handle of its graph."""
    call = _calls[key]
    saved = _SavedTensors(tensors, call.parameters(tensors))
    graph = _Graph(saved)
    with _recording(saved, is_enabled=any(call.needs_grad)):
        anchor = torch.zeros((), requires_grad=True)
        pairs = zip(tensors, call.needs_grad, strict=True)
        inputs = [_Input.apply(one, anchor) if needs else one.detach() for one, needs in pairs]  # type: ignore[no-untyped-call]
        outputs = call.run(call.function, inputs, integers)
        graph.inputs, graph.outputs = _edges(inputs), _edges(outputs)
    handle = torch.zeros((), dtype=torch.int64)
    setattr(handle.untyped_storage(), _GRAPH, graph)
    return [*(_own(one.detach(), saved.used) for one in outputs), handle]


@_forward.register_fake
def _(tensors: list[torch.Tensor], integers: list[int], key: str) -> list[torch.Tensor]:
    call = _calls[key]
    shapes = call.run(call.shapes, tensors, integers)
    outputs = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in shapes)
    return [*outputs, torch.empty((), dtype=torch.int64, device="cpu")]


@torch.library.custom_op("booster::opaque_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grads: list[torch.Tensor | None],
    parameters: list[torch.Tensor],
    handle: torch.Tensor,
    sizes: list[int],
    key: str,
) -> list[torch.Tensor]:
    """Return the gradients of the tensors that need one, zeros for those that no output depends on."""
    graph: _Graph = getattr(handle.untyped_storage(), _GRAPH)
    used = {_storage(one) for one in grads if one is not None}
    made = []
    for grad, missing in zip(graph.backward(grads, parameters), _empty_gradients(sizes, key), strict=True):
        made.append(missing().zero_() if grad is None else _own(grad, used))
        used.add(_storage(made[-1]))
    return made


@_backward.register_fake
def _(grads: Any, parameters: Any, handle: Any, sizes: list[int], key: str) -> list[torch.Tensor]:
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


@dataclass(frozen=True, slots=True)
class _SavedParameter:
    """A parameter, or a view of one, that a graph takes from its backward."""

    graph: _SavedTensors
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        base = self.graph.parameters[self.index].detach()
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class _SavedTensors:
    """Saved-tensor hooks of a graph, which save nothing in the memory of other tensors: compiled code overwrites these.

    Args:
        tensors: Tensors of the call.
        parameters: Those of them that are parameters.

    Attributes:
        parameters: The parameters during a backward.
        used: Storages of the tensors of the call and of saved tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self.parameters: Sequence[torch.Tensor] = ()
        self._ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in parameters]
        self._others = {_storage(one) for one in tensors}
        self.used = set(self._others)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedParameter:
        pointer, storage = tensor.data_ptr(), _storage(tensor)
        for index, (start, stop) in enumerate(self._ranges):
            if start <= pointer < stop:
                offset = (pointer - start) // tensor.itemsize
                return _SavedParameter(self, index, tensor.size(), tensor.stride(), offset)
        if storage in self._others:
            return tensor.clone()
        self.used.add(storage)
        return tensor.detach()


class _Graph:
    """Autograd graph of one call. Its nodes reference the saved tensors, but not the graph, which references the nodes.

    Args:
        saved: Hooks of its saved tensors.

    Attributes:
        inputs: Gradient edges of the tensors of the call, None for those without gradient.
        outputs: Gradient edges of the outputs, None for those without gradient.
    """

    inputs: list[GradientEdge | None]
    outputs: list[GradientEdge | None]

    def __init__(self, saved: _SavedTensors) -> None:
        self._saved = saved

    def backward(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs that need one.

        Args:
            grads: Gradients of the outputs.
            parameters: Parameters of the call.
        """
        pairs = [(end, grad) for end, grad in zip(self.outputs, grads, strict=True) if end and grad is not None]
        wanted = [one for one in self.inputs if one is not None]
        if not pairs:
            return [None] * len(wanted)
        self._saved.parameters = parameters
        try:
            ends, of_ends = zip(*pairs, strict=True)
            # The graph stays for another backward through the compiled one, and goes with its handle.
            return torch.autograd.grad(ends, wanted, of_ends, retain_graph=True, allow_unused=True)
        finally:
            self._saved.parameters = ()


@contextmanager
def _recording(saved: _SavedTensors, *, is_enabled: bool) -> Iterator[None]:
    """Context in which autograd works as outside of operators, if it is enabled, with these saved-tensor hooks."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack),
        torch.set_grad_enabled(is_enabled),
    ):
        yield


def _unpack(saved: torch.Tensor | _SavedParameter) -> torch.Tensor:
    return saved.unpack() if isinstance(saved, _SavedParameter) else saved


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(tensor: torch.Tensor, used: set[int]) -> torch.Tensor:
    """Return a contiguous tensor of its own memory, as outputs of operators must be."""
    if tensor.is_contiguous() and _storage(tensor) not in used:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
