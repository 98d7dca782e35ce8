"""Integer program of a training step: strategies of operators, costs of sites, memory; see Note [Placement costs].

Note [Placement costs]
The choices of an operator are its strategies, in seconds of the kernel with the shapes that a rank has, and of the
call. Those of a site are the conversions that the plugin has there, in seconds of the collective. An edge requires the
placement in which its value is made, so conversions are at sites only; between layers all is replicated.
The choices of a parameter are its placements. They cost the optimizer's step, and they take memory: weight, gradient
and optimizer states, by the elements that a rank has. A gradient is placed as its parameter is; that of a replicated
parameter that is used on sharded features is all-reduced. A bias behind a row-parallel layer counts as partial: the
plugin adds it once, after the all-reduce.
An activation that backward reads takes memory as its operator places it, once for all views of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from booster.estimate.machine_profile import MachineProfile
from booster.estimate.operator_costs import operator_cost

from .integer_program import IntegerProgram, Solution
from .layer_graph import LayerGraph, Node, TensorShape, Value, with_operands
from .layout_conversion import AxisSpeed
from .sharding_rules import PARTIAL, REPLICATED, Strategy, TensorPlacement, sharded, sharding_rules
from .styles import ModuleStyle, StyledModule, module_before, output_heads

_OPERATION_OF = {("partial", "replicated"): "all_reduce", ("sharded", "replicated"): "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs on one machine, by the speed of its operators and of the tensor-parallel axis."""

    profile: MachineProfile
    axis: AxisSpeed

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.axis.size

    def operator(self, node: Node, strategy: Strategy) -> float:
        """Return the seconds of an operator on a rank."""
        tensors, results = (
            [_local(shape, one, self.num_ranks) for shape, one in zip(shapes, placements, strict=True)]
            for shapes, placements in ((node.input_shapes, strategy.inputs), (node.outputs, strategy.outputs))
        )
        args, kwargs = with_operands((node.args, dict(node.kwargs)), tensors)
        cost = operator_cost(node.func, args, kwargs, with_operands(node.result, results))
        seconds = 0.0 if cost is None else self.call(cost.seconds(self.profile))
        rows = math.prod(node.outputs[0].shape[:-1])
        return seconds + sum(self.all_reduce(4 * number * rows) for number in strategy.reductions)

    def call(self, kernel: float) -> float:
        """Return the seconds of a call with its kernel."""
        call = self.profile.call_seconds
        return max(call, kernel) if self.profile.is_asynchronous else call + kernel

    def all_reduce(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of a tensor."""
        size = self.num_ranks
        return self.axis.seconds("all_reduce", 2 * (size - 1) * num_bytes / size) if size > 1 else 0.0

    def conversion(self, tensor: TensorShape, before: TensorPlacement, after: TensorPlacement) -> float:
        """Return the seconds of a site's conversion."""
        if before == after:
            return 0.0
        local = math.prod(before.local_shape(tensor.shape, self.num_ranks)) * tensor.dtype.itemsize
        operation = _OPERATION_OF.get((before.kind, after.kind))
        if operation is None:  # a local slice
            return self.call(self.axis.copy.seconds(2 * local / self.num_ranks))
        if operation == "all_reduce":
            return self.all_reduce(local)
        return self.axis.seconds("all_gather", local * (self.num_ranks - 1))

    def step(self, graph: LayerGraph, num_elements: float) -> float:
        """Return the seconds of the optimizer's step for some of the elements that it updates."""
        share = num_elements / graph.step_elements
        return share * sum(
            self.profile.step_call_seconds + cost.seconds(self.profile, is_cold=True) for cost in graph.step_costs
        )


def data_parallel_seconds(graph: LayerGraph, costs: StepCosts) -> float:
    """Return the seconds of a step with replicated weights, whose gradients are all-reduced beside backward.

    The graph is that of a rank's share of the batch.
    """
    computation = {False: 0.0, True: 0.0}
    gradient_bytes = 0
    for _, node in graph.kept():
        if node.kind == "gradient":
            gradient_bytes += graph.count(node) * node.outputs[0].num_bytes
        if node.kind != "operator":
            continue
        replicated = Strategy((REPLICATED,) * len(node.inputs), (REPLICATED,) * len(node.outputs))
        computation[node.is_backward] += graph.count(node) * costs.operator(node, replicated)
    reduction = costs.all_reduce(gradient_bytes)
    overlap = costs.axis.collectives[1].overlap if costs.num_ranks > 1 else 0.0
    hidden = overlap * min(reduction, computation[True])
    return sum(computation.values()) + reduction - hidden + costs.step(graph, graph.num_elements)


@dataclass(slots=True)
class _Choices:
    """Choices of a node: placements of inputs and outputs, seconds and bytes of each."""

    strategies: list[Strategy]
    costs: list[float]
    memory: list[float] = field(default_factory=list)

    def outputs(self, output: int) -> list[TensorPlacement]:
        return [one.outputs[output] for one in self.strategies]

    def options(self, output: int) -> list[TensorPlacement]:
        return list(dict.fromkeys(self.outputs(output)))


class PlacementProgram:
    """Integer program of a training step; see Note [Placement costs]."""

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        modules: Sequence[StyledModule],
        costs: StepCosts,
    ) -> None:
        self._graph, self._costs = graph, costs
        self._rules = sharding_rules(costs.num_ranks)
        self._modules = {module.name: module for module in modules}
        self._weights: dict[str, list[TensorPlacement]] = {}
        for module in modules:
            self._weights.setdefault(module.weight, []).extend(style.weight for style in module.styles)
        self._heads = output_heads(model, graph)  # their logits may stay sharded
        self._biases = self._bias_options(model)
        self._kept = _kept_storages(graph)
        self._choices: dict[int, _Choices] = {}
        self._variables: dict[int, int] = {}
        self.program = IntegerProgram()
        self.styles: dict[str, int] = {}
        for index, node in graph.kept():
            self._add(index, node)
        self._add_styles()

    def partial_gradients(self, solution: Solution) -> Iterator[str]:
        """Yield the names of the parameters whose gradients are all-reduced."""
        for index, node in self._graph.kept():
            if node.kind == "gradient" and self._strategy(index, solution).inputs[0] == PARTIAL:
                yield node.name

    def style_of(self, name: str, solution: Solution) -> ModuleStyle:
        """Return the style of a module in a solution."""
        return self._modules[name].styles[solution.choices[self.styles[name]]]

    def style_choices(self, name: str, styles: Iterable[str]) -> dict[int, list[int]]:
        """Return the restriction of the program to some styles of a module."""
        names = [one.name for one in self._modules[name].styles]
        return {self.styles[name]: [names.index(one) for one in styles]}

    def joined_modules(self, solution: Solution) -> list[frozenset[str]]:
        """Return the modules of each group that hands on sharded tensors, or shares a sharded weight."""
        group: dict[int | str, int | str] = {}  # of nodes, and of modules, whose sites are in one group

        def root(index: int) -> int | str:
            node = self._graph.nodes[index]
            found = node.name if node.site in ("input", "output") else index
            while group.setdefault(found, found) != found:
                found = group[found]
            return found

        for index, node in self._graph.kept():
            if node.is_backward or node.kind == "gradient":
                continue
            for value, placement in zip(node.inputs, self._strategy(index, solution).inputs, strict=True):
                if value is not None and value.node in self._choices and placement.kind == "sharded":
                    group[root(index)] = root(value.node)
        members: dict[int | str, set[str]] = {}
        for index, node in self._graph.kept():
            if node.site in ("input", "output") and not node.is_backward and node.name in group:
                members.setdefault(root(index), set()).add(node.name)
        return [frozenset(one) for one in members.values()]

    def _strategy(self, index: int, solution: Solution) -> Strategy:
        return self._choices[index].strategies[solution.choices[self._variables[index]]]

    def _add(self, index: int, node: Node) -> None:
        options = [self._options(node, value) for value in node.inputs]
        if node.kind == "operator":
            given = [(REPLICATED,)] * len(options) if self._writes_into_view(node) else options
            strategies = self._rules.strategies(node, given)
            seconds = [self._costs.operator(node, one) for one in strategies]
            choices = _Choices(strategies, seconds)
        elif node.kind == "parameter":
            choices = self._parameter(node)
        elif node.kind == "site":
            pairs = [(before, after) for before in options[0] for after in self._conversions(node, before)]
            choices = self._converting(node, pairs)
        elif node.kind == "gradient":
            choices = self._converting(node, [(one, _summed(one)) for one in options[0]])
        else:
            choices = _Choices([Strategy((), (REPLICATED,) * len(node.outputs))], [0.0])
        count = self._graph.count(node)
        memory = choices.memory or self._activation_memory(index, node, choices.strategies)
        self._choices[index] = choices
        self._variables[index] = self.program.add_node(
            [count * one for one in choices.costs], [count * one for one in memory]
        )
        for position, value in enumerate(node.inputs):
            if value is not None:
                self._connect(index, position, value)
        for value in {self._graph.loss, *self._graph.outputs}:
            if value.node == index and module_before(self._graph, value) not in self._heads:
                fits = [[one == REPLICATED] for one in choices.outputs(value.output)]
                self._require(self._variables[index], self.program.add_node([0.0]), fits)

    def _options(self, node: Node, value: Value | None) -> list[TensorPlacement]:
        if value is None or value.node not in self._choices or self._graph.nodes[value.node].layer != node.layer:
            return [REPLICATED]
        return self._choices[value.node].options(value.output)

    def _connect(self, index: int, position: int, value: Value) -> None:
        node, source = self._graph.nodes[index], self._graph.nodes[value.node]
        if value.node not in self._choices:  # of a layer that another one stands for
            return
        made = self._choices[value.node].outputs(value.output)
        read = [one.inputs[position] for one in self._choices[index].strategies]
        crosses = source.layer != node.layer
        fits = [[a == b and not (crosses and a != REPLICATED) for b in read] for a in made]
        self._require(self._variables[value.node], self._variables[index], fits)

    def _require(self, source: int, target: int, fits: Sequence[Sequence[bool]]) -> None:
        """Add an edge that excludes the pairs of choices that do not fit."""
        is_fit = np.array(fits, dtype=bool).reshape(len(fits), -1)
        self.program.add_edge(source, target, np.where(is_fit, 0.0, math.inf))

    def _parameter(self, node: Node) -> _Choices:
        placements = list(dict.fromkeys(self._weights.get(node.name) or self._biases.get(node.name) or [REPLICATED]))
        shape = node.outputs[0]
        elements = [math.prod(one.local_shape(shape.shape, self._costs.num_ranks)) for one in placements]
        is_trained = any(one.kind == "gradient" and one.name == node.name for one in self._graph.nodes)
        held = 2 * shape.dtype.itemsize + self._graph.state_bytes if is_trained else shape.dtype.itemsize
        return _Choices(
            [Strategy((), (one,)) for one in placements],
            [self._costs.step(self._graph, one) if is_trained else 0.0 for one in elements],
            [one * held for one in elements],
        )

    def _converting(self, node: Node, pairs: Sequence[tuple[TensorPlacement, TensorPlacement]]) -> _Choices:
        shape = node.input_shapes[0]
        return _Choices(
            [Strategy((before,), (after,)) for before, after in pairs],
            [self._costs.conversion(shape, before, after) for before, after in pairs],
        )

    def _conversions(self, node: Node, before: TensorPlacement) -> Iterable[TensorPlacement]:
        """Yield the placements to which a site converts another; see Note [Executable placements]."""
        if node.site == "boundary":
            yield from (before,) if before == REPLICATED else ()
            return
        if before.kind != "partial":
            yield before
        last = len(node.input_shapes[0].shape) - 1
        is_last = before.kind == "sharded" and before.dim == last and before.num_blocks == 1
        if before.kind == "partial":
            if node.site == "input":
                yield before  # reduced together with those of other layers that read the tensor
            if node.is_backward or node.site == "output":
                yield REPLICATED
        elif before == REPLICATED and (node.site, node.is_backward) in (("input", False), ("output", True)):
            yield sharded(last)
        elif is_last and (node.site, node.is_backward) in (("output", False), ("input", True)):
            yield REPLICATED

    def _activation_memory(self, index: int, node: Node, strategies: Sequence[Strategy]) -> list[float]:
        """Return the bytes of activations that a node makes and backward reads, for each strategy."""
        kept = self._kept.get(index, ())
        held = []
        for strategy in strategies:
            total = 0
            for output in kept:
                shape, placement = node.outputs[output], strategy.outputs[output]
                is_new = node.kind != "site" or (
                    strategy.inputs[0].kind != "partial" and strategy.inputs[0] != placement
                )
                local = math.prod(placement.local_shape(shape.shape, self._costs.num_ranks))
                total += local * shape.dtype.itemsize if is_new else 0
            held.append(float(total))
        return held

    def _writes_into_view(self, node: Node) -> bool:
        """Whether an in-place operator changes the values of tensors that it does not read."""
        if not node.func._schema.is_mutable or not node.inputs or node.inputs[0] is None:
            return False
        source = self._graph.nodes[node.inputs[0].node]
        before = [self._graph.nodes[one.node] for one in source.inputs if one is not None]
        is_inplace = source.func is not None and source.func._schema.is_mutable
        return not is_inplace and any(set(one.storages) & set(source.storages) for one in before)

    def _bias_options(self, model: nn.Module) -> dict[str, list[TensorPlacement]]:
        """Return the placements of the biases of linear layers: as the weight's outputs, or counted once."""
        found = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in self._modules.values():
            bias = model.get_submodule(module.name)._parameters.get("bias")
            if bias is None:
                continue
            blocks = {one.weight.num_blocks for one in module.styles if one.weight.kind == "sharded"}
            found[names[id(bias)]] = [REPLICATED, PARTIAL, *(sharded(0, number) for number in sorted(blocks))]
        return found

    def _add_styles(self) -> None:
        """Add a node with the style of each module, and edges to what the style is made of."""
        parameters = {node.name: index for index, node in self._graph.kept() if node.kind == "parameter"}
        for name, module in self._modules.items():
            variable = self.styles[name] = self.program.add_node([0.0] * len(module.styles))
            weights = self._choices[parameters[module.weight]].outputs(0)
            fits = [[style.weight == one for one in weights] for style in module.styles]
            self._require(variable, self._variables[parameters[module.weight]], fits)
        for index, node in self._graph.kept():
            if node.kind == "site" and not node.is_backward and node.name in self._modules:
                strategies = self._choices[index].strategies
                are_fit = ModuleStyle.fits_input if node.site == "input" else ModuleStyle.fits_output
                styles = self._modules[node.name].styles
                fits = [[are_fit(style, one.inputs[0], one.outputs[0]) for one in strategies] for style in styles]
                self._require(self.styles[node.name], self._variables[index], fits)
            elif node.kind == "gradient" and node.name in parameters:
                held = map(_summed, self._choices[parameters[node.name]].outputs(0))
                fits = [[one == final for final in self._choices[index].outputs(0)] for one in held]
                self._require(self._variables[parameters[node.name]], self._variables[index], fits)


def _summed(placement: TensorPlacement) -> TensorPlacement:
    return REPLICATED if placement == PARTIAL else placement


def _kept_storages(graph: LayerGraph) -> Mapping[int, tuple[int, ...]]:
    """Return the outputs of forward nodes whose storage backward reads, by the node that made it."""
    read = {
        graph.nodes[value.node].storages[value.output]
        for _, node in graph.kept()
        if node.is_backward
        for value in node.inputs
        if value is not None and not graph.nodes[value.node].is_backward
    }
    made: dict[int, int] = {}  # the first node with each storage
    found: dict[int, list[int]] = {}
    for index, node in graph.kept():
        if node.is_backward or node.kind == "gradient":
            continue
        for output, storage in enumerate(node.storages):
            is_first = storage not in made
            made.setdefault(storage, index)
            if storage in read and (is_first or node.kind == "site") and node.kind in ("operator", "site"):
                found.setdefault(index, []).append(output)
    return {index: tuple(outputs) for index, outputs in found.items()}


def _local(shape: TensorShape, placement: TensorPlacement, num_ranks: int) -> torch.Tensor:
    """Return a tensor without values of the shape that a rank has, expanded where the tensor is."""
    sizes = placement.local_shape(shape.shape, num_ranks)
    strides, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda one: (shape.stride[one], -one)):
        if shape.stride[dim] or shape.shape[dim] <= 1:
            strides[dim] = step
            step *= max(sizes[dim], 1)
    return torch.empty_strided(sizes, strides, dtype=shape.dtype, device="meta")
