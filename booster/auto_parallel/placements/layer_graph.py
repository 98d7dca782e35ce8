"""Operator graph of a training step: forward and backward of each kind of layer, recorded on fake tensors.

Note [Operator graph]
The model's own code runs forward and backward once on fake tensors, under a dispatch mode. Every aten operator is a
node, every tensor that it reads an edge from the node that made it. Parameters, inputs and constants are nodes without
inputs, the gradient of each parameter ends in a node.
Where tensor parallelism communicates, identity functions are inserted, whose calls in forward and in backward are nodes
of their own, *sites*: at the input and the output of linear layers and embeddings, and at a tensor that several of them
read (its gradient is summed over them before it is reduced, once). Layers of stacks have them at their inputs and
outputs, which tell to which layer an operator of backward belongs.
Layers that record the same operators with the same shapes, and read parameters of the same names, are one kind: only
the first layer of a kind stays in the graph, with the number of layers that it stands for. That is exact because
tensors between layers are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from booster.core.layer_stacks import find_stacks, stack_layer_of
from booster.core.model_wrapper import call_with_batch
from booster.errors import ConfigError
from booster.estimate.allocation_tracker import run_operator, storage_key
from booster.estimate.estimate import TrainingRecipe, new_fake_mode
from booster.estimate.operator_costs import CostRecorder, OperatorCost
from booster.estimate.repeated_layers import find_repeated_layers
from booster.estimate.simulation import on_fake_tensors
from booster.pytree import iter_tensors, map_tensors

_NUM_RECORDED = 3  # layers of a long stack: the first may compute no gradient of its input

Site = Literal["", "boundary", "shared", "input", "output"]


@dataclass(frozen=True, slots=True)
class Value:
    """A node's output: the index of the node, and that of the output."""

    node: int
    output: int


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape, strides and dtype of a recorded tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorShape:
        """Return those of a tensor."""
        return TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Operand:
    """Place of a tensor among an operator's arguments: the index of the node's input."""

    index: int


def with_operands(tree: Any, values: Sequence[Any]) -> Any:
    """Return arguments of an operator with values in the places of its tensors."""
    return tree_map_only(Operand, lambda one: values[one.index], tree)


@dataclass(slots=True, kw_only=True)
class Node:
    """Node of the graph; see Note [Operator graph].

    Attributes:
        kind: "operator"; "leaf" for inputs and constants; "parameter"; "site"; "gradient" of a parameter.
        inputs: Values that it reads; None for what was made outside of the recording.
        outputs: Shapes of its results.
        func: The operator.
        args: Its arguments, with an `Operand` in the place of each tensor.
        kwargs: Its keyword arguments, likewise.
        result: What it returns, likewise.
        is_backward: Whether it belongs to backward.
        layer: Layer of a stack that it belongs to, or "".
        name: Name of a parameter, or of a site's module.
        site: Place of a site.
        storages: Key of each output's storage, the same for a site's input and output.
        input_shapes: Shapes of what it reads.
    """

    kind: Literal["operator", "leaf", "parameter", "site", "gradient"]
    inputs: list[Value | None] = field(default_factory=list)
    outputs: list[TensorShape] = field(default_factory=list)
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    is_backward: bool = False
    layer: str = ""
    name: str = ""
    site: Site = ""
    storages: list[int] = field(default_factory=list)
    input_shapes: list[TensorShape] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """Operators of a training step, of one layer of each kind.

    Attributes:
        nodes: All recorded nodes, in the order of their execution.
        counts: Number of layers that a layer's nodes stand for; 0 for those that another layer stands for.
        kinds: Names of the layers of each kind, by its first layer.
        loss: The loss.
        outputs: What the model returns.
        users_of_weight: Modules whose calls read each parameter, "" for code outside of linear layers and embeddings.
        state_bytes: Bytes of the optimizer's states per element of a parameter.
        step_costs: Costs of the operators of the optimizer's step.
        step_elements: Elements of parameters that this step updated.
        num_elements: Elements of the whole model that the optimizer updates.
    """

    nodes: list[Node]
    counts: Mapping[str, int]
    kinds: Mapping[str, tuple[str, ...]]
    loss: Value
    outputs: tuple[Value, ...]
    users_of_weight: Mapping[str, frozenset[str]]
    state_bytes: float
    step_costs: list[OperatorCost]
    step_elements: int
    num_elements: int

    def count(self, node: Node) -> int:
        """Return how many nodes of the model a node stands for."""
        return self.counts.get(node.layer, 1)

    def kept(self) -> Iterator[tuple[int, Node]]:
        """Yield the nodes that are not represented by those of another layer."""
        return ((index, node) for index, node in enumerate(self.nodes) if self.count(node))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a weight that is a parameter: `nn.Linear`, or transformers' Conv1D."""
    if isinstance(module, nn.Linear):
        return "weight" in module._parameters
    weight = module._parameters.get("weight")
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight is not None and weight.dim() == 2


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding with a weight that is a parameter."""
    return isinstance(module, nn.Embedding) and "weight" in module._parameters


def record_step(recipe: TrainingRecipe) -> LayerGraph:
    """Record a training step on fake tensors, with a few of many identical layers; see Note [Operator graph].

    Raises:
        ConfigError: The model can't be run on fake tensors, or the loss does not depend on it.
    """
    repeated = find_repeated_layers(recipe.model)
    if repeated is None:
        return _record(recipe)
    try:
        graph = _record(recipe, (repeated, _NUM_RECORDED))
    except ConfigError:  # a model that depends on its number of layers: the whole one reports real errors
        return _record(recipe)
    layers = [f"{repeated}.{key}" for key in recipe.model.get_submodule(repeated)._modules]
    recorded, others = layers[:_NUM_RECORDED], layers[_NUM_RECORDED:]
    first = next((one for one, kind in graph.kinds.items() if set(recorded[1:]) <= set(kind)), None)
    if first is None or _has_operators_between(graph, recorded):
        return _record(recipe)
    kind = (*graph.kinds[first], *others)
    counts = {**graph.counts, **dict.fromkeys(others, 0), first: len(kind)}
    return replace(graph, counts=counts, kinds={**graph.kinds, first: kind})


def _has_operators_between(graph: LayerGraph, layers: Sequence[str]) -> bool:
    """Whether the model computes between layers: with more of them it would have more operators outside of layers."""
    for is_backward in (False, True):
        own = [index for index, node in enumerate(graph.nodes) if node.is_backward == is_backward]
        inside = [index for index in own if graph.nodes[index].layer in layers]
        between = [graph.nodes[index] for index in own if inside[0] < index < inside[-1]]
        if any(node.kind == "operator" and node.layer not in layers for node in between):
            return True
    return False


def _record(recipe: TrainingRecipe, layers: tuple[str, int] | None = None) -> LayerGraph:
    mode = new_fake_mode()
    model, optimizer, batch = recipe.make_fake(mode, torch.device("cpu"), layers)
    model.train()
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(_hooks(model, recorder))
        for tensor in iter_tensors(batch):
            recorder.leaf(tensor)
        advice = "its control flow depends on values of the batch: give plan= to the plugin instead"
        with on_fake_tensors(model, "record its operators", advice):
            outputs = call_with_batch(model, batch)
            loss = recipe.criterion(outputs, batch)
        returned = [recorder.value_of(one) for one in iter_tensors(outputs)]
        recorder.end_forward()
        loss_value = recorder.value_of(loss)
        if not loss.requires_grad or loss_value is None:
            raise ConfigError(
                f"the loss of {type(model).__name__} depends on no parameter that is trained: unfreeze some, or give a"
                " criterion of the model's outputs"
            )
        loss.backward()  # type: ignore[no-untyped-call]
    step = CostRecorder()
    with mode, step:
        optimizer.step()
    trained = [one for one in model.parameters() if one.grad is not None]
    num_elements = sum(one.numel() for one in trained) or 1
    states = [one for one in iter_tensors(dict(optimizer.state)) if one.dim()]
    counts, kinds = _kinds(recorder.nodes)
    return LayerGraph(
        nodes=recorder.nodes,
        counts=counts,
        kinds=kinds,
        loss=loss_value,
        outputs=tuple(one for one in returned if one is not None),
        users_of_weight={name: frozenset(users) for name, users in recorder.users.items()},
        state_bytes=sum(one.nbytes for one in states) / num_elements,
        step_costs=step.costs,
        step_elements=num_elements,
        num_elements=sum(one.numel() for one in recipe.model.parameters() if one.requires_grad),
    )


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.users: dict[str, set[str]] = {}
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []  # keeps `id`s and storages unique
        self._roots: dict[int, int] = {}
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_paused = self._is_backward = False
        self.layer = ""
        self.calls: list[str] = []  # linear layers and embeddings whose forward runs
        stacks = find_stacks(model)
        parameters = list(model.named_parameters())
        self._layers = {name: stack_layer_of(name, stacks) or "" for name, _ in parameters}
        self._names = {id(parameter): name for name, parameter in parameters}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        given = list(iter_tensors((args, kwargs)))
        inputs = [self._read(one) for one in given]
        shapes = [TensorShape.of(one) for one in given]  # before an operator that resizes
        result = run_operator(func, args, kwargs)
        results = [result] if isinstance(result, torch.Tensor) else list(iter_tensors(result))
        if results:
            counter = iter(range(len(given)))
            arguments = map_tensors(lambda _: Operand(next(counter)), {"args": tuple(args), "kwargs": dict(kwargs)})
            returned = iter(range(len(results)))
            places = map_tensors(lambda _: Operand(next(returned)), result)
            self._write(self._node("operator", inputs, shapes, func=func, result=places, **arguments), results)
        return result

    def leaf(self, tensor: torch.Tensor) -> None:
        self._write(self._node("leaf", [], []), [tensor])

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        return self._values.get(id(tensor))

    def end_forward(self) -> None:
        self._is_backward, self.layer = True, ""

    def site(self, tensor: torch.Tensor, site: Site, name: str, *, is_backward: bool) -> torch.Tensor:
        """Return a copy of a tensor that is the output of a site."""
        source = self._read(tensor)
        self._is_paused = True
        try:
            copy = tensor.clone()
        finally:
            self._is_paused = False
        shape = TensorShape.of(tensor)
        node = self._node("site", [source], [shape], site=site, name=name, is_backward=is_backward)
        self._roots[storage_key(copy)] = self._storage(tensor)
        self._write(node, [copy])
        return copy

    def shared_site(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output of the site of a tensor that linear layers read: one per tensor."""
        if id(tensor) not in self._shared:
            self._shared[id(tensor)] = (tensor, _Site.apply(tensor, self, "shared", ""))
        return self._shared[id(tensor)][1]

    def gradient(self, name: str, tensor: torch.Tensor) -> None:
        shapes, storages = [TensorShape.of(tensor)], [self._storage(tensor)]
        given: dict[str, Any] = {"name": name, "layer": self._layers[name], "outputs": shapes, "storages": storages}
        self._node("gradient", [self._read(tensor)], shapes, **given)

    def _node(self, kind: Any, inputs: list[Value | None], shapes: list[TensorShape], **given: Any) -> Node:
        position: dict[str, Any] = {"is_backward": self._is_backward, "layer": self.layer}
        self.nodes.append(Node(kind=kind, inputs=inputs, input_shapes=shapes, **(position | given)))
        return self.nodes[-1]

    def _read(self, tensor: torch.Tensor) -> Value | None:
        name = self._names.get(id(tensor))
        if name is not None:
            if not self._is_backward:
                self.users.setdefault(name, set()).add(self.calls[-1] if self.calls else "")
            if id(tensor) not in self._values:
                node = self._node("parameter", [], [], name=name, layer=self._layers[name], is_backward=False)
                self._write(node, [tensor])
        return self._values.get(id(tensor))

    def _write(self, node: Node, tensors: list[torch.Tensor]) -> None:
        index = len(self.nodes) - 1
        for output, tensor in enumerate(tensors):
            self._values[id(tensor)] = Value(index, output)
            self._alive.append(tensor)
        node.outputs = [TensorShape.of(one) for one in tensors]
        node.storages = [self._storage(one) for one in tensors]

    def _storage(self, tensor: torch.Tensor) -> int:
        """Return the key of a tensor's storage; a site's output is counted as its input."""
        key = storage_key(tensor)
        return self._roots.get(key, key)


class _Site(torch.autograd.Function):
    """Identity, whose calls in forward and backward are sites."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        tensor: torch.Tensor,
        recorder: _Recorder,
        site: Site,
        name: str,
        at_backward: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        ctx.recorder, ctx.site, ctx.name, ctx.at_backward = recorder, site, name, at_backward
        return recorder.site(tensor, site, name, is_backward=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        copy = ctx.recorder.site(grad, ctx.site, ctx.name, is_backward=True)
        ctx.at_backward()
        return copy, None, None, None, None


@contextmanager
def _hooks(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Insert sites into a model, and record the gradients of its parameters."""
    modules = dict(model.named_modules())
    layers = [name for stack in find_stacks(model) for name in stack]
    called = [name for name, one in modules.items() if is_linear(one) or is_embedding(one)]
    hooks: list[_LayerScope | _ModuleSites] = [_LayerScope(name, recorder) for name in layers]
    hooks += [_ModuleSites(name, recorder) for name in called]
    with ExitStack() as stack:
        for name, one in zip((*layers, *called), hooks, strict=True):
            module = modules[name]
            stack.callback(module.register_forward_pre_hook(one.enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(one.leave).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(partial(recorder.gradient, name)).remove)
        yield


class _LayerScope:
    """Hooks of a stack's layer, between which operators belong to it."""

    def __init__(self, name: str, recorder: _Recorder) -> None:
        self._name, self._recorder = name, recorder
        self._num_open = 0
        self._outer = ""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._outer, self._recorder.layer = self._recorder.layer, self._name
        return self._mark((args, kwargs), self._end_backward, counts=True)

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        marked = self._mark(outputs, partial(setattr, self._recorder, "layer", self._name))
        self._recorder.layer = self._outer
        return marked

    def _mark(self, tree: Any, at_backward: Callable[[], object], *, counts: bool = False) -> Any:
        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            self._num_open += counts
            marked: torch.Tensor = _Site.apply(tensor, self._recorder, "boundary", self._name, at_backward)
            return marked

        return map_tensors(mark, tree)

    def _end_backward(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._recorder.layer = ""


class _ModuleSites:
    """Hooks of a linear layer or an embedding, which insert sites at its input and output."""

    def __init__(self, name: str, recorder: _Recorder) -> None:
        self._name, self._recorder = name, recorder

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._recorder.calls.append(self._name)
        if not is_linear(module) or not args or not isinstance(args[0], torch.Tensor):
            return None
        shared = self._recorder.shared_site(args[0])
        return (_Site.apply(shared, self._recorder, "input", self._name), *args[1:]), kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._recorder.calls.pop()
        if not isinstance(output, torch.Tensor):
            return output
        return _Site.apply(output, self._recorder, "output", self._name)


def _kinds(nodes: list[Node]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return how many layers each layer stands for, and the layers of each kind by its first one."""
    of_layer: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        of_layer.setdefault(node.layer, []).append(index)
    outside = of_layer.pop("", [])
    kinds: dict[Any, list[str]] = {}
    for layer, indices in of_layer.items():
        kinds.setdefault(_signature(nodes, layer, indices), []).append(layer)
    grouped = {layers[0]: tuple(layers) for layers in kinds.values()}
    counts = {layer: 0 for layers in grouped.values() for layer in layers}
    counts |= {first: len(layers) for first, layers in grouped.items()}
    return counts | ({"": 1} if outside else {}), grouped


def _signature(nodes: list[Node], layer: str, indices: list[int]) -> tuple[Any, ...]:
    place = {index: number for number, index in enumerate(indices)}
    found: list[Any] = []
    for node in map(nodes.__getitem__, indices):
        sources = [
            None if one is None else (place[one.node], one.output) if one.node in place else "outside"
            for one in node.inputs
        ]
        operator = (node.kind, str(node.func), repr(node.args), repr(sorted(node.kwargs.items())))
        position = (node.name.removeprefix(layer), node.site, node.is_backward, tuple(map(str, sources)))
        found.append((operator, position, tuple(node.outputs), tuple(node.input_shapes)))
    return tuple(found)
