"""Strategies of an operator on a 1-D mesh: placements of its inputs and outputs, by the sharding rules of DTensor.

Note [Strategies]
torch is asked, for placements of the inputs, whether the operator runs on local tensors as they are, and how its output
is placed then. Combinations for which torch would redistribute an input first are no strategies: that is communication,
which `HybridParallelPlugin` does at sites only (Note [Operator graph]). An operator on replicated inputs has a
replicated output, which needs no question; without a rule it has this strategy alone.
Some computations of the plugin are not an operator's own, or torch has no rule for them:

- Packed dimensions: n equal blocks, of each of which a rank has a part, as query, key and value in one matrix, or the
  heads of all examples in one dimension. To an operator that keeps the dimension they are shards as any other, and a
  split into the n blocks, or a view that makes them a dimension, gives shards.
- Vocabulary parallelism: a rank looks up the rows of an embedding that it has, and the others' results are zero. The
  cross-entropy of logits that are sharded over the classes reduces a maximum and three sums of each row.
- Attention kernels, which are independent for each example and head.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_leaves

from booster.errors import ConfigError

from .layer_graph import Node, TensorShape, with_operands


@dataclass(frozen=True, slots=True, order=True)
class TensorPlacement:
    """Placement of a tensor on the ranks.

    Attributes:
        kind: "replicated", "sharded" or "partial" (a sum over the ranks).
        dim: Dimension that is sharded.
        num_blocks: Number of equal blocks of this dimension of each of which a rank has a part.
    """

    kind: Literal["replicated", "sharded", "partial"]
    dim: int = 0
    num_blocks: int = 1

    def __str__(self) -> str:
        blocks = f" in {self.num_blocks} blocks" if self.num_blocks > 1 else ""
        return f"{self.kind} {self.dim}{blocks}" if self.kind == "sharded" else self.kind

    def local_shape(self, shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
        """Return the largest shape that a rank has of a tensor."""
        local = list(shape)
        if self.kind == "sharded":
            local[self.dim] = -(-local[self.dim] // num_ranks)
        return tuple(local)


REPLICATED = TensorPlacement("replicated")
PARTIAL = TensorPlacement("partial")


def sharded(dim: int, num_blocks: int = 1) -> TensorPlacement:
    """Return the placement that shards a dimension."""
    return TensorPlacement("sharded", dim, num_blocks)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements of an operator's tensors, for which it needs no communication but the given.

    Attributes:
        inputs: Placements of its inputs.
        outputs: Placements of its outputs.
        reductions: Rows of the logits of which so many fp32 numbers are all-reduced, one number per collective.
    """

    inputs: tuple[TensorPlacement, ...]
    outputs: tuple[TensorPlacement, ...]
    reductions: tuple[int, ...] = ()


_MAX_COMBINATIONS = 512
_VIEWS = ("view", "_unsafe_view", "reshape")
# Operators for which the parts of a packed dimension are not like those of any other.
_READS_BLOCKS = ("split", "cat", "slice", "select", "narrow", "unbind", "roll", "flip", "cumsum", "sort", "topk")


class ShardingRules:
    """Strategies of operators on a number of ranks; see Note [Strategies]."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._mesh = _mesh_without_groups(num_ranks)
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        self._known: dict[Any, tuple[TensorPlacement, ...] | None] = {}

    def strategies(self, node: Node, options: Sequence[Iterable[TensorPlacement]]) -> list[Strategy]:
        """Return the strategies of an operator whose inputs may each have some placements."""
        replicated = Strategy((REPLICATED,) * len(node.inputs), (REPLICATED,) * len(node.outputs))
        found = [replicated] if all(REPLICATED in one for one in options) else []
        for inputs in _combinations(node, [tuple(one) for one in options]):
            if all(one == REPLICATED for one in inputs):
                continue
            outputs = self._outputs(node, inputs)
            if outputs is not None:
                found.append(Strategy(inputs, outputs))
        own = _OWN_RULES.get(_name(node.func))
        if own is not None:
            allowed = [set(one) for one in options]
            for strategy in own(node):
                if all(one in some for one, some in zip(strategy.inputs, allowed, strict=True)):
                    found.append(strategy)
        return list(dict.fromkeys(found))

    def _outputs(self, node: Node, inputs: tuple[TensorPlacement, ...]) -> tuple[TensorPlacement, ...] | None:
        """Return the outputs' placements, or None if the operator can't run so."""
        blocks = {one.num_blocks for one in inputs if one.kind == "sharded"}
        if len(blocks) > 1:
            return None
        num_blocks = next(iter(blocks), 1)
        name = _name(node.func)
        if name.startswith("split") or name == "cat":
            packed = _split_blocks(node, inputs) if name != "cat" else _join_blocks(node, inputs, self._num_ranks)
            if packed is not None or num_blocks > 1:
                return packed
        if num_blocks > 1 and any(one in name for one in _READS_BLOCKS):
            return None
        plain = tuple(TensorPlacement(one.kind, one.dim) for one in inputs)
        outputs = self._ask(node, plain) if name not in _VIEWS or num_blocks == 1 else None
        if outputs is None and name in _VIEWS:
            return _reshape_blocks(node, inputs[0], self._num_ranks)
        if outputs is None or num_blocks == 1:
            return outputs
        return _repacked(node, inputs, outputs, num_blocks)

    def _ask(self, node: Node, inputs: tuple[TensorPlacement, ...]) -> tuple[TensorPlacement, ...] | None:
        key = (node.func, repr(node.args), repr(node.kwargs), tuple(node.input_shapes), inputs)
        if key not in self._known:
            self._known[key] = self._propagate(node, inputs)
        return self._known[key]

    def _propagate(self, node: Node, inputs: tuple[TensorPlacement, ...]) -> tuple[TensorPlacement, ...] | None:
        specs = [self._spec(shape, one) for shape, one in zip(node.input_shapes, inputs, strict=True)]
        args, kwargs = with_operands((node.args, dict(node.kwargs)), specs)
        # Since 2.14 torch finds specs in lists only where the operator's information says that it has lists.
        known = (vars(self._propagator).get(f"op_to_schema_info{one}", {}) for one in _KINDS_OF_RULES)
        info = next((one[node.func] for one in known if node.func in one), None)
        try:
            with torch.no_grad():
                schema = OpSchema(node.func, args, kwargs, schema_info=info)
                answer = self._propagator.propagate_op_sharding_non_cached(schema)
        except Exception:  # torch has no rule for the operator or these placements; which error says so differs
            return None
        needed = answer.redistribute_schema if answer.needs_redistribute else None
        if needed is not None:  # also if only arguments that are shapes become local
            wanted, given = _specs((needed.args_schema, needed.kwargs_schema)), _specs((args, kwargs))
            if [one.placements for one in wanted] != [one.placements for one in given]:
                return None
        outputs = tuple(_read(one) for one in _specs(answer.output_spec))
        if len(outputs) != len(node.outputs):
            return None
        return None if None in outputs else outputs  # type: ignore[return-value]

    def _spec(self, shape: TensorShape, placement: TensorPlacement) -> DTensorSpec:
        meta = TensorMeta(torch.Size(shape.shape), shape.stride, shape.dtype)
        whole = Partial() if placement.kind == "partial" else Replicate()
        placed = Shard(placement.dim) if placement.kind == "sharded" else whole
        return DTensorSpec(self._mesh, (placed,), tensor_meta=meta)


_KINDS_OF_RULES = ("", "_for_single_dim_strategy")


@lru_cache(maxsize=8)
def sharding_rules(num_ranks: int) -> ShardingRules:
    """Return the rules of a number of ranks, which remember what torch has answered."""
    return ShardingRules(num_ranks)


def _mesh_without_groups(num_ranks: int) -> DeviceMesh:
    """Return a mesh on which placements are propagated, and nothing is sent.

    Raises:
        ConfigError: This version of torch can't make one.
    """
    parameters = inspect.signature(DeviceMesh.__init__).parameters
    if not {"_init_backend", "_rank"} <= parameters.keys():
        raise ConfigError(
            f"torch {torch.__version__} has no device mesh without process groups, which the solver of placements asks"
            " for sharding rules: use torch 2.10 to 2.14"
        )
    with torch.device("cpu"):
        return DeviceMesh("cpu", torch.arange(num_ranks), _init_backend=False, _rank=0)


def _combinations(node: Node, options: list[tuple[TensorPlacement, ...]]) -> Iterator[tuple[TensorPlacement, ...]]:
    """Yield the placements of all inputs; a value that is read twice has one of them."""
    sources = [source if source is not None else index for index, source in enumerate(node.inputs)]
    distinct = list(dict.fromkeys(sources))
    choices = [options[sources.index(one)] for one in distinct]
    if math.prod(map(len, choices)) > _MAX_COMBINATIONS:  # all alike, where they can be
        for placement in dict.fromkeys(itertools.chain(*choices)):
            yield tuple(placement if placement in one else REPLICATED for one in options)
        return
    for chosen in itertools.product(*choices):
        by_source = dict(zip(distinct, chosen, strict=True))
        yield tuple(by_source[one] for one in sources)


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _read(spec: DTensorSpec) -> TensorPlacement | None:
    """Return a placement that the plugin has, too, or None."""
    (placement,) = spec.placements
    if type(placement) is Shard:
        return sharded(placement.dim)
    if isinstance(placement, Replicate):
        return REPLICATED
    return PARTIAL if type(placement) is Partial and placement.reduce_op == "sum" else None


def _specs(tree: Any) -> list[DTensorSpec]:
    return [one for one in tree_leaves(tree) if isinstance(one, DTensorSpec)]


def _repacked(
    node: Node, inputs: tuple[TensorPlacement, ...], outputs: tuple[TensorPlacement, ...], num_blocks: int
) -> tuple[TensorPlacement, ...] | None:
    """Return outputs with the packed dimension of the inputs, or None if an operator does not keep it."""
    sizes = {
        shape.shape[one.dim] for shape, one in zip(node.input_shapes, inputs, strict=True) if one.kind == "sharded"
    }
    kept = [
        one.kind != "sharded" or shape.shape[one.dim] in sizes for shape, one in zip(node.outputs, outputs, strict=True)
    ]
    if len(sizes) != 1 or not all(kept):
        return None
    return tuple(sharded(one.dim, num_blocks) if one.kind == "sharded" else one for one in outputs)


def _reshape_blocks(node: Node, given: TensorPlacement, num_ranks: int) -> tuple[TensorPlacement, ...] | None:
    """Return the placement of a reshaped tensor.

    In the order of the elements, a tensor consists of as many blocks as there are indices before the sharded dimension,
    times those of a packed dimension; each rank has a part of each. A dimension of the result is sharded if it ends
    where these blocks do. So batch * heads is a packed dimension of as many blocks as there are examples.
    """
    if given.kind != "sharded":
        return None
    before, after = node.input_shapes[0].shape, node.outputs[0].shape
    num_blocks = math.prod(before[: given.dim]) * given.num_blocks
    if before[given.dim] // given.num_blocks % num_ranks:
        return None
    outer = 1
    for dim, size in enumerate(after):
        inner, rest = divmod(num_blocks, outer)
        if rest or size == 0:
            return None
        if inner < size:
            is_aligned = size % inner == 0 and size // inner % num_ranks == 0
            return (sharded(dim, inner),) if is_aligned else None
        outer *= size
    return None


def _split_blocks(node: Node, inputs: tuple[TensorPlacement, ...]) -> tuple[TensorPlacement, ...] | None:
    """Return the placements of the blocks into which a packed dimension is split."""
    given = inputs[0]
    dim = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", 0))
    dim %= len(node.input_shapes[0].shape)
    sizes = {one.shape[dim] for one in node.outputs}
    if given.kind != "sharded" or given.dim != dim or given.num_blocks != len(node.outputs) or len(sizes) != 1:
        return None
    return (sharded(dim),) * len(node.outputs)


def _join_blocks(node: Node, inputs: tuple[TensorPlacement, ...], num_ranks: int) -> tuple[TensorPlacement, ...] | None:
    """Return the placement of a packed dimension that blocks are concatenated to, in the backward of a split."""
    rank = len(node.outputs[0].shape)
    dim = (int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))) % rank
    sizes = {one.shape[dim] for one in node.input_shapes if len(one.shape) == rank}
    is_alike = len(set(inputs)) == 1 and inputs[0] == sharded(dim) and len(sizes) == 1
    if not is_alike or next(iter(sizes)) % num_ranks:
        return None
    return (sharded(dim, len(inputs)),)


def _log_softmax(node: Node, *reductions: int) -> Iterator[Strategy]:
    last, num_inputs = len(node.outputs[0].shape) - 1, len(node.inputs)
    if node.args[num_inputs] % (last + 1) == last and last > 0:
        yield Strategy((sharded(last),) * num_inputs, (sharded(last),), reductions)


def _attention(node: Node) -> Iterator[Strategy]:
    """Yield the strategy of heads: a mask is replicated, all that has the queries' dimensions sharded."""
    heads = node.outputs[0].shape[1] if node.outputs else 0
    inputs, outputs = (
        tuple(sharded(1) if len(one.shape) >= 3 and one.shape[1] == heads else REPLICATED for one in shapes)
        for shapes in (node.input_shapes, node.outputs)
    )
    if heads > 1:
        yield Strategy(inputs, outputs)


_OWN_RULES: Mapping[str, Callable[[Node], Iterable[Strategy]]] = {
    "embedding": lambda _: [Strategy((sharded(0), REPLICATED), (PARTIAL,))],
    "embedding_dense_backward": lambda _: [Strategy((REPLICATED, REPLICATED), (sharded(0),))],
    "_log_softmax": lambda node: _log_softmax(node, 1, 3),
    "_log_softmax_backward_data": _log_softmax,
    # Without weights of classes, which would be a further input.
    "nll_loss_forward": lambda node: (
        [Strategy((sharded(1), REPLICATED), (REPLICATED, REPLICATED))] if len(node.inputs) == 2 else []
    ),
    "nll_loss_backward": lambda node: (
        [Strategy((REPLICATED, sharded(1), REPLICATED, REPLICATED), (sharded(1),))] if len(node.inputs) == 4 else []
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}
