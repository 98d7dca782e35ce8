"""Symbolic tracing of a model's forward, to find where the model may be split."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch.fx
from torch import nn


def find_gaps(model: nn.Module, layers: tuple[str, ...], known: Mapping[str, int | None]) -> dict[str, int]:
    """Return the gaps of the outermost modules with parameters and without layers of the chain.

    Args:
        model: The user's model.
        layers: Layers, as in `StagePlan`.
        known: Gaps of modules with a known order of execution, or None for a module that runs in several gaps.
    """
    index = {name: number for number, name in enumerate(layers)}
    containers = containers_of(layers)
    # A further name of a layer or of a container of layers has no gap.
    placed = {id(model.get_submodule(name)) for name in (*layers, *containers)}
    gaps: dict[str, int] = {}
    reached = 0
    for name, module in _outermost(model, "", index, containers):
        if name in index:
            reached = index[name] + 1
        elif id(module) not in placed and holds_parameters(module):
            gap = known.get(name, reached)
            if gap is not None:
                gaps[name] = gap
    return gaps


def containers_of(layers: tuple[str, ...]) -> frozenset[str]:
    """Return the names of all modules that contain layers of the chain, with the full model ("")."""
    parts = [name.split(".") for name in layers]
    return frozenset(".".join(one[:length]) for one in parts for length in range(len(one)))


def outside_of(name: str, containers: frozenset[str]) -> str:
    """Return the outermost parent of a module that contains no layer of the chain."""
    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((path for path in paths if path not in containers), name)


def holds_parameters(module: nn.Module) -> bool:
    """Return whether a module or a submodule has parameters."""
    return any(True for _ in module.parameters())


def _outermost(
    module: nn.Module, name: str, index: Mapping[str, int], containers: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers and the outermost modules without layers, in order of registration, but layers as they run."""
    children = [
        (f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None
    ]
    with_layers = [one for one in children if one[0] in containers or one[0] in index]
    first_layer = {
        full: min(number for layer, number in index.items() if f"{layer}.".startswith(f"{full}."))
        for full, _ in with_layers
    }
    ordered = iter(sorted(with_layers, key=lambda one: first_layer[one[0]]))
    for own in children:
        full, child = next(ordered) if own in with_layers else own
        if full in containers:
            yield from _outermost(child, full, index, containers)
        else:
            yield full, child


class Trace:
    """Module calls of one forward, in order.

    Args:
        model: Model that was traced.
        graph: Graph of its forward, in which modules outside of `containers` are leaf calls.
        containers: Names of the modules that were traced into.
    """

    def __init__(self, model: nn.Module, graph: torch.fx.Graph, containers: frozenset[str]) -> None:
        self._nodes = list(graph.nodes)
        self._index = {node: place for place, node in enumerate(self._nodes)}
        self._calls: dict[str, list[int]] = {}
        self._reads: dict[str, list[int]] = {}
        # Whether a node depends on parameters of only one stage. All others are computed on every stage.
        self._is_local: dict[torch.fx.Node, bool] = {}
        for place, node in enumerate(self._nodes):
            is_local = any(self._is_local[before] for before in node.all_input_nodes)
            if node.op == "call_module":
                self._calls.setdefault(str(node.target), []).append(place)
                is_local = is_local or holds_parameters(model.get_submodule(str(node.target)))
            elif node.op == "get_attr" and (owner := str(node.target).rpartition(".")[0]) not in containers:
                self._reads.setdefault(owner, []).append(place)
                is_local = True
            self._is_local[node] = is_local

    def order(self, name: str) -> int:
        """Return the index of the call of a module that is called once."""
        return self._calls[name][0]

    def runs_once(self, items: tuple[str, ...]) -> bool:
        """Return whether each module is called once, and none of their parameters is read without a call."""
        is_read = any(f"{owner}.".startswith(f"{item}.") for item in items for owner in self._reads)
        return not is_read and all(len(self._calls.get(item, ())) == 1 for item in items)

    def is_chain(self, items: tuple[str, ...]) -> bool:
        """Return whether modules run once each, in this order, and the model may be split after all but the last."""
        if not self.runs_once(items):
            return False
        places = [self.order(item) for item in items]
        return places == sorted(places) and all(self.may_split_after(item) for item in items[:-1])

    def may_split_after(self, name: str) -> bool:
        """Return whether all values used after a module depend on it, or are computed on every stage."""
        end = self.order(name)
        return not any(
            self._is_local[before] and self._index[before] < end
            for node in self._nodes[end + 1 :]
            for before in node.all_input_nodes
        )

    def bypassing(self, name: str) -> str:
        """Return the name of a module or parameter whose value bypasses a module, at which no split is possible."""
        end = self.order(name)
        inputs = (before for node in self._nodes[end + 1 :] for before in node.all_input_nodes)
        value = next(before for before in inputs if self._is_local[before] and self._index[before] < end)
        while value.op not in ("call_module", "get_attr"):  # to the last computation with parameters
            value = max((one for one in value.all_input_nodes if self._is_local[one]), key=self._index.__getitem__)
        return str(value.target)

    def gaps(self, layers: tuple[str, ...]) -> dict[str, int | None]:
        """Return the gap of each module that is called or whose parameters are read, or None if it has several."""
        ends = [self.order(layer) for layer in layers]
        found: dict[str, set[int]] = {}
        for places in (self._calls, self._reads):
            for name, at in places.items():
                outermost = outside_of(name, containers_of(layers))
                found.setdefault(outermost, set()).update(sum(end < place for end in ends) for place in at)
        return {name: gaps.pop() if len(gaps) == 1 else None for name, gaps in found.items() if name not in layers}


def trace_calls(model: nn.Module, lists: Iterable[tuple[str, ...]]) -> Trace | None:
    """Return the module calls of a model's forward, or None if it depends on values and can't be traced.

    Args:
        model: The user's model, which is not changed.
        lists: Names of leaf modules; modules that contain none of them are leaves, too.
    """
    items = tuple(item for one in lists for item in one)
    if not items:
        return None
    containers = containers_of(items)
    skeleton = _copy_of_containers(model, "", containers)
    try:
        graph = _Tracer(containers).trace(skeleton)
    except Exception:  # the user's forward may raise any exception on symbolic values
        return None
    return Trace(model, graph, containers)


class _Tracer(torch.fx.Tracer):
    def __init__(self, containers: frozenset[str]) -> None:
        super().__init__()
        self._containers = containers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Trace only into modules that contain layers."""
        return module_qualified_name not in self._containers


def _copy_of_containers(module: nn.Module, name: str, containers: frozenset[str]) -> nn.Module:
    """Return a copy whose forward may set attributes without changing the user's model; leaf modules are shared."""
    copied = copy.copy(module)
    copied.__dict__["_buffers"] = {
        key: None if buffer is None else buffer.clone() for key, buffer in module._buffers.items()
    }
    copied.__dict__["_modules"] = {
        key: _copy_of_containers(child, f"{name}.{key}" if name else key, containers)
        if child is not None and (f"{name}.{key}" if name else key) in containers
        else child
        for key, child in module._modules.items()
    }
    return copied
