"""Styles of linear layers and embeddings: what of a solution is a user's plan of HybridParallelPlugin.

Note [Executable placements]
The plugin communicates at the sites of a module (Note [Operator graph]), as its style says. A style is a choice of the
weight's placement, of the conversion at the module's input, and of that at its output; those that no style has are not
offered to the solver. Their conversions in backward are the transposed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .layer_graph import LayerGraph, Value, is_embedding, is_linear
from .sharding_rules import REPLICATED, TensorPlacement, sharded

REPLICATED_STYLE = "replicated"
PARTIAL_GRADIENT_STYLE = "replicated_with_grad_allreduce"


class ChosenStyle(str):
    """Name of a style in a plan, with the reason of its choice, which the plugin's `explain` prints.

    Attributes:
        reason: The reason.
    """

    reason: str

    def __new__(cls, name: str, reason: str = "") -> ChosenStyle:
        """Return the name with a reason."""
        chosen = super().__new__(cls, name)
        chosen.reason = reason
        return chosen

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return what a copy is made of."""
        return str(self), self.reason


@dataclass(frozen=True, slots=True)
class ModuleStyle:
    """A style that a module may have; see Note [Executable placements].

    Attributes:
        name: Name of the style in plans.
        weight: Placement of the weight.
        input: "keep", "replicated" (it must be), "sharded" (it must be) or "slice".
        output: "keep", "sharded" (it stays so), "reduce", "gather", or "any" (it stays sharded or is gathered).
    """

    name: str
    weight: TensorPlacement
    input: str
    output: str

    def fits_input(self, before: TensorPlacement, after: TensorPlacement) -> bool:
        """Whether the style converts an input from one placement to another."""
        if self.input == "slice":
            return before == REPLICATED and after.kind == "sharded"
        wanted = {"keep": ("replicated", "sharded"), "replicated": ("replicated",), "sharded": ("sharded",)}
        return before == after and before.kind in wanted[self.input]

    def fits_output(self, before: TensorPlacement, after: TensorPlacement) -> bool:
        """Whether the style converts an output from one placement to another."""
        if self.output == "keep":
            return before == after and before.kind != "partial"
        if self.output == "reduce":
            return before.kind == "partial" and after == REPLICATED
        stays, is_gathered = before == after, after == REPLICATED
        is_sharded = before.kind == "sharded"
        return is_sharded and ((self.output != "gather" and stays) or (self.output != "sharded" and is_gathered))


@dataclass(frozen=True, slots=True, kw_only=True)
class StyledModule:
    """A module that styles apply to, with the name of its weight in the graph, and the styles that it may have."""

    name: str
    weight: str
    styles: tuple[ModuleStyle, ...]


def styled_modules(model: nn.Module, graph: LayerGraph, num_ranks: int) -> list[StyledModule]:
    """Return the linear layers and embeddings of a model's graph with their styles.

    A weight that other code reads too, such as a functional call, stays replicated.
    """
    called = {node.name for _, node in graph.kept() if node.kind == "site" and node.site == "output"}
    names_of = _names_of_weights(model)
    blocks = _packed_outputs(graph)
    heads = output_heads(model, graph)
    found = []
    for name, module in model.named_modules():
        if name not in called or not (is_linear(module) or is_embedding(module)):
            continue
        weight, users = names_of[id(module.get_parameter("weight"))]
        replicated = ModuleStyle(REPLICATED_STYLE, REPLICATED, "keep", "keep")
        styles = [replicated]
        if graph.users_of_weight.get(weight, frozenset()) <= users:
            is_vocabulary = len(users) > 1 or name in heads
            styles += _styles(module, num_ranks, blocks.get(name, ()), is_vocabulary, is_tied=len(users) > 1)
        found.append(StyledModule(name=name, weight=weight, styles=tuple(styles)))
    return found


def _styles(
    module: nn.Module, num_ranks: int, blocks: tuple[int, ...], is_vocabulary: bool, *, is_tied: bool
) -> Iterator[ModuleStyle]:
    """Yield the styles of a module that divide its weight."""
    rows, columns = module.get_parameter("weight").shape
    if is_embedding(module):
        if rows >= num_ranks:
            yield ModuleStyle("vocab", sharded(0), "keep", "reduce")
        if columns % num_ranks == 0 and not is_tied:
            yield ModuleStyle("embedding_colwise_gather_output", sharded(1), "keep", "gather")
        return
    out_dim = 0 if isinstance(module, nn.Linear) else 1
    num_outputs, num_inputs = (columns, rows) if out_dim else (rows, columns)
    if is_vocabulary:  # vocabularies are padded
        if num_outputs >= num_ranks and out_dim == 0:
            yield ModuleStyle("vocab_head", sharded(0), "replicated", "any")
    elif num_outputs % num_ranks == 0:
        yield ModuleStyle("colwise", sharded(out_dim), "replicated", "sharded")
        yield ModuleStyle("colwise_gather_output", sharded(out_dim), "replicated", "gather")
        for number in blocks:
            if num_outputs % (number * num_ranks) == 0:
                yield ModuleStyle(f"packed_colwise:{number}", sharded(out_dim, number), "replicated", "sharded")
    if num_inputs % num_ranks == 0 and not is_tied:
        yield ModuleStyle("rowwise", sharded(1 - out_dim), "sharded", "reduce")
        yield ModuleStyle("rowwise_split_input", sharded(1 - out_dim), "slice", "reduce")


def _names_of_weights(model: nn.Module) -> dict[int, tuple[str, frozenset[str]]]:
    """Return the first name of each weight by its id, and the modules that have it."""
    found: dict[int, tuple[str, set[str]]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (is_linear(module) or is_embedding(module)):
            own = f"{name}.weight" if name else "weight"
            found.setdefault(id(weight), (own, set()))[1].add(name)
    return {key: (name, frozenset(users)) for key, (name, users) in found.items()}


def _packed_outputs(graph: LayerGraph) -> Mapping[str, tuple[int, ...]]:
    """Return into how many equal blocks the outputs of modules are split, by module."""
    found: dict[str, set[int]] = {}
    for _, node in graph.kept():
        if node.kind != "operator" or node.is_backward or not str(node.func).startswith("aten.split"):
            continue
        last = len(node.input_shapes[0].shape) - 1
        dim = int(node.args[2]) if len(node.args) > 2 else 0
        if dim % (last + 1) != last or len({one.shape[last] for one in node.outputs}) != 1 or len(node.outputs) < 2:
            continue
        source = module_before(graph, node.inputs[0])
        if source is not None:
            found.setdefault(source, set()).add(len(node.outputs))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def module_before(graph: LayerGraph, value: Value | None) -> str | None:
    """Return the module whose output a value is, through operators that read one tensor and keep its last dimension."""
    while value is not None:
        node = graph.nodes[value.node]
        if node.kind == "site" and node.site == "output":
            return node.name
        if len(node.inputs) != 1 or node.kind == "parameter":
            return None
        if node.input_shapes[0].shape[-1:] != node.outputs[value.output].shape[-1:]:
            return None
        value = node.inputs[0]
    return None


def output_heads(model: nn.Module, graph: LayerGraph) -> frozenset[str]:
    """Return the linear layers that compute logits: those that the model names, and those of which it has a softmax.

    Layers of stacks are none.
    """
    candidates = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    named = {id(one()) for one in candidates if callable(one)}
    found = {name for name, module in model.named_modules() if id(module) in named and is_linear(module)}
    for _, node in graph.kept():
        if str(node.func).startswith("aten._log_softmax.") and not node.layer:
            source = module_before(graph, node.inputs[0])
            if source is not None and not any(source.startswith(f"{layer}.") for layer in graph.counts if layer):
                found.add(source)
    return frozenset(found)
