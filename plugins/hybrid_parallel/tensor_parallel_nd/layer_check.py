"""Verify, by running them, that layers compute on blocks of activations what they compute on all of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from booster.core.layer_stacks import stack_layer_of
from booster.errors import ConfigError, first_line
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import hidden_key
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import sharded_spec
from booster.plugins.hybrid_parallel.tp_plan.attention_heads import owner_of
from booster.plugins.hybrid_parallel.tp_plan.equivalence_check import (
    EquivalenceCheck,
    all_close,
    module_signature,
    record_calls,
    run,
    run_equivalence_check,
)
from booster.plugins.hybrid_parallel.tp_plan.plan import (
    CLOSING_STYLES,
    OPEN_STYLES,
    PlannedEntry,
    TensorParallelPlan,
    generalize,
)
from booster.pytree import map_tensors

from .feature_reductions import FeatureReductions, Where
from .grid import TensorGridShape, examples_of
from .plan import FEATURE_WISE, grid_spec, is_on_grid

_ROUNDING = 1e-5  # of layers that compute a part in single precision

# Note [Layers on blocks]
# A layer is run on all activations, and what its linear layers, means and norms over features get and return is
# recorded. It is then run as on a rank: on the rank's block of the hidden states, with its shards of the parameters and
# its numbers of heads. There a linear layer, a mean or a norm returns the rank's block of what was recorded, as the
# ranks compute it together. If each of them gets the rank's block of what was recorded, and so is the output, then
# nothing else depends on features of other ranks, on their number or on their places. This is done for the first and
# the last rank. A layer that can't be run alone is not verified; a note of the plan says so.


def verify_layers(plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape) -> tuple[str, ...]:
    """Verify that layers compute examples independently, these being dim 0, and features; see Note [Layers on blocks].

    Args:
        plan: Result of `plan_for_grid`.
        model: The user's model. It is not changed.
        grid: The grid.

    Returns:
        Notes on layers that can't be run alone.

    Raises:
        ConfigError: A layer mixes what would be divided.
    """
    notes: dict[str, None] = {}
    known: set[tuple[object, ...]] = set()
    for name in (layer for stack in plan.divided_stacks for layer in stack):
        layer = model.get_submodule(name)
        entries = [entry for entry in plan.entries if is_on_grid(entry) and stack_layer_of(entry.name, ((name,),))]
        kind = module_signature(layer, tuple(entry.name.removeprefix(name) for entry in entries))
        if kind in known:
            continue
        known.add(kind)
        check = run_equivalence_check(layer)
        reason = check if isinstance(check, str) else _verify_examples(check, name, grid)
        if reason or isinstance(check, str):
            notes[
                f"{generalize(name)}: hidden states are taken for (batch, ..., features) whose examples and features"
                f" are computed independently, not verified: {reason}"
            ] = None
            continue
        for one in (check, check.training):
            if one is not None:
                _verify_features(one, _Layer(name, tuple(entries), plan, grid))
    return tuple(notes)


def _verify_examples(check: EquivalenceCheck, name: str, grid: TensorGridShape) -> str:
    """Return why the layer can't be run on fewer examples, or ""."""
    again = run(check.module, check.inputs, check.arguments, seed=3)
    if not all_close(again[:1], check.output[:1], _ROUNDING):
        return "it draws random numbers in evaluation, too"
    try:
        (output, *_), (expected, *_) = run(check.module, check.inputs[1:], check.arguments), check.output
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    if not all_close(output, expected[1:]):
        raise ConfigError(
            f"{name!r} mixes the first dimension of its hidden states, which tp_mode={grid.mode!r} divides as the"
            " examples of a batch: give hidden states as (batch, tokens, features), or use tp_mode='1d'"
        )
    return ""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with its entries on the grid, in a plan for a grid."""

    name: str
    entries: tuple[PlannedEntry, ...]
    plan: TensorParallelPlan
    grid: TensorGridShape

    def inner(self, name: str) -> str:
        """Return the name of a module inside of the layer, as seen from the layer."""
        return name.removeprefix(self.name).removeprefix(".")

    @property
    def linears(self) -> dict[str, PlannedEntry]:
        """Entries of the linear layers, by name as seen from the layer."""
        styles = OPEN_STYLES | CLOSING_STYLES
        return {self.inner(entry.name): entry for entry in self.entries if entry.style in styles}

    @property
    def feature_wise(self) -> list[str]:
        """Names of the modules with one value per feature, as seen from the layer."""
        return [self.inner(entry.name) for entry in self.entries if entry.style == FEATURE_WISE]

    @property
    def regions(self) -> set[str]:
        """Names of the modules that contain first layers of pairs, as seen from the layer."""
        return {self.inner(owner_of(entry.name)) for entry in self.linears.values() if entry.style in OPEN_STYLES}


_Call = tuple[torch.Tensor, torch.Tensor]  # the input and the output


def _verify_features(check: EquivalenceCheck, layer: _Layer) -> None:
    module, reductions = copy.deepcopy(check.module), list[_Call]()
    _attach(module, layer, functools.partial(_RecordedReductions, reductions))
    output, recorded = record_calls(module, layer.linears, check.inputs, check.arguments)
    calls = {name: [(given[0], result) for given, result in of_layer] for name, of_layer in recorded.items()}
    for rank in dict.fromkeys((0, layer.grid.num_ranks - 1)):
        place = _Rank(layer, rank, check.inputs.shape[0])
        reason = place.find_difference(check, output[0], calls, reductions)
        if reason:
            raise ConfigError(
                f"the layer {layer.name!r} computes something that depends on all of its features, or on their number"
                f" or places, of which tp_mode={layer.grid.mode!r} gives each rank a part ({reason}): use"
                " tp_mode='1d', or in a layer only linear layers, means over the last dimension, LayerNorm, RMSNorm"
                " and what is computed for each feature alone, with sizes that are attributes in place of x.shape[-1]"
            )


def _attach(module: nn.Module, layer: _Layer, make: Callable[[str, str, Where, torch.Size], Any]) -> None:
    """Run a layer, and its modules with one value per feature, in modes as `divide_features` does."""
    places: list[tuple[str, Where]] = [("", "layer"), *((name, "module") for name in layer.feature_wise)]
    if layer.grid.mode == "3d":
        places += [(name, "region") for name in layer.regions if name]
    for name, where in places:
        one = module.get_submodule(name)
        full_name = f"{layer.name}.{name}" if name else layer.name
        one.forward = functools.partial(
            _run_in_mode, one.forward, functools.partial(make, full_name, layer.grid.mode, where)
        )


def _run_in_mode(forward: Callable[..., Any], make: Callable[[torch.Size], Any], *args: Any, **kwargs: Any) -> Any:
    key = hidden_key(args, kwargs)
    hidden = kwargs[key] if isinstance(key, str) else args[key]
    with make(hidden.shape):
        return forward(*args, **kwargs)


class _RecordedReductions(FeatureReductions):
    """Reductions over all features, which are recorded."""

    def __init__(self, calls: list[_Call], *args: Any) -> None:
        super().__init__(*args)
        self._calls = calls

    def mean(self, x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        return self._record(x, lambda: x.mean(-1, keepdim, dtype=dtype))

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return self._record(x, lambda: nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        return self._record(x, lambda: nn.functional.rms_norm(x, x.shape[-1:], weight, eps))

    def _record(self, x: torch.Tensor, reduce: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # outside of the modes of modules around this one
            output = reduce()
            self._calls.append((x.clone(), output.clone()))
        return output


class _ReplayedReductions(FeatureReductions):
    """Reductions that return a rank's block of what was recorded."""

    def __init__(self, replay: Callable[[torch.Tensor, str], torch.Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._replay = replay

    def mean(self, x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        return self._replay(x, f"a mean in {self._name}")

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return self._replay(x, f"layer norm in {self._name}")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        return self._replay(x, f"RMS norm in {self._name}")


class _Difference(Exception):
    """A layer computes on a block something else than a block of what it computes on all activations."""


class _Rank:
    """A layer as on a rank of the grid, with blocks of what was recorded on all activations.

    Args:
        layer: The layer.
        rank: The rank.
        num_examples: Number of examples of what was recorded.
    """

    def __init__(self, layer: _Layer, rank: int, num_examples: int) -> None:
        self._layer, self._rank, self._num_examples = layer, rank, num_examples
        self._grid = layer.grid
        self._coordinates = layer.grid.coordinates(rank)

    def find_difference(
        self,
        check: EquivalenceCheck,
        expected: torch.Tensor,
        calls: Mapping[str, Sequence[_Call]],
        reductions: Sequence[_Call],
    ) -> str:
        """Run a copy of the layer; return what differs from the rank's block of what was recorded, or ""."""
        module = copy.deepcopy(check.module)
        self._take_shards(module)
        for name, entry in self._layer.linears.items():
            module.get_submodule(name).forward = functools.partial(self._multiply, entry, iter(calls.get(name, ())))
        for name in self._layer.regions:
            hook = functools.partial(self._take_states, check.inputs)
            module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        reduce = functools.partial(self._reduce, iter(reductions))
        _attach(module, self._layer, functools.partial(_ReplayedReductions, reduce))
        try:
            output = run(module, self._outer(check.inputs, 0), check.arguments)[0]
        except _Difference as error:
            return str(error)
        except ConfigError:
            raise
        except Exception as error:  # a user's forward may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        return "" if all_close(output, self._outer(expected, 0), _ROUNDING) else "its output"

    def _take_shards(self, module: nn.Module) -> None:
        """Give a copy of the layer the rank's shards and numbers of heads, as `parallelize` does."""
        layer, grid = self._layer, self._grid
        for entry in layer.entries:
            owner = module.get_submodule(layer.inner(entry.name))
            for name, parameter in list(owner.named_parameters(recurse=False)):
                shard_spec = grid_spec(entry, name, tuple(parameter.shape), grid, self._rank)
                setattr(owner, name, nn.Parameter(shard_spec.shard(parameter), requires_grad=False))
            if isinstance(owner, nn.Embedding):
                owner.embedding_dim = owner.weight.shape[1]
        for change in layer.plan.attributes:
            if stack_layer_of(change.module, ((layer.name,),)):
                own = replace(change, module=layer.inner(change.module))
                own.apply(module, grid.side, self._coordinates[grid.inner.features])

    def _multiply(self, entry: PlannedEntry, calls: Iterator[_Call], x: torch.Tensor) -> torch.Tensor:
        inner = functools.partial(self._inner, entry)
        read, written = (inner, self._outer) if entry.style in CLOSING_STYLES else (self._outer, inner)
        return _replayed(calls, x, f"the input of {entry.name}", read, written)

    def _reduce(self, calls: Iterator[_Call], x: torch.Tensor, what: str) -> torch.Tensor:
        def of_result(result: torch.Tensor, dim: int | None) -> torch.Tensor:
            return self._outer(result, dim, has_features=result.dim() == x.dim() and result.shape[-1] > 1)

        return _replayed(calls, x, f"the input of {what}", self._outer, of_result)

    def _take_states(
        self, inputs: torch.Tensor, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Divide the states of another sequence, as `take_own_examples` does."""

        def own(x: torch.Tensor) -> torch.Tensor:
            is_undivided = x.dim() == inputs.dim() and (len(x), x.shape[-1]) == (len(inputs), inputs.shape[-1])
            return self._outer(x, 0) if is_undivided else x

        return map_tensors(own, args), map_tensors(own, kwargs)

    def _outer(self, x: torch.Tensor, dim: int | None, *, has_features: bool = True) -> torch.Tensor:
        """Return the block in the outer layout; `dim` has the examples."""
        own = self._examples(x, dim, self._grid.outer.batch)
        return own.chunk(self._grid.side, -1)[self._coordinates[self._grid.outer.features]] if has_features else own

    def _inner(self, entry: PlannedEntry, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Return the block between the two linear layers of a pair; `dim` has the examples."""
        own = self._examples(x, dim, self._grid.inner.batch)
        index = self._coordinates[self._grid.inner.features]
        return sharded_spec(own.shape, own.dim() - 1, entry.blocks, self._grid.side, index).shard(own)

    def _examples(self, x: torch.Tensor, dim: int | None, axes: Sequence[str]) -> torch.Tensor:
        if dim is None or dim >= x.dim() or x.shape[dim] % self._num_examples:
            return x
        examples = x.movedim(dim, 0).unflatten(0, (self._num_examples, -1))  # tokens may be in the same dimension
        own = examples_of(examples, self._grid.num_batch_shards, self._grid.index(self._rank, axes))
        return own.flatten(0, 1).movedim(0, dim)


_Part = Callable[[torch.Tensor, int | None], torch.Tensor]


def _replayed(calls: Iterator[_Call], x: torch.Tensor, what: str, read: _Part, written: _Part) -> torch.Tensor:
    """Return a rank's part of what the next call returned, if the input is a rank's part of what it got."""
    given, output = next(calls, (None, None))
    if given is not None and output is not None:
        with torch._C.DisableTorchFunction():  # outside of the layer's modes
            for dim in (0, 1, None):  # code in a layer may put tokens first
                if all_close(x, read(given, dim), _ROUNDING):
                    return written(output, dim)
    raise _Difference(what)
