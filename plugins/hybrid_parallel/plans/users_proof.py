"""Proves of a user's plan that modules compute the same in parts, where they can be run alone. See Note [Probing]."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.check import CLOSING_STYLES, OPEN_STYLES, entries_near
from booster.plugins.hybrid_parallel.plans.features import feature_sizes
from booster.plugins.hybrid_parallel.plans.patterns import generalized
from booster.plugins.hybrid_parallel.plans.plan import AttributeChange, PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.plans.probing import SIZES_OF_THE_WHOLE, cut_layer, doubled, equal, run, samples
from booster.plugins.hybrid_parallel.plans.probing import module_kind as kind_of
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.splits import split_layout

__all__ = ["prove_users_plan"]

_CUT = OPEN_STYLES | {"embedding_colwise"}
_WHOLE_OUTSIDE = frozenset(  # what these give, and what they are given, is the same as without a split
    {
        "colwise_gather_output",
        "embedding_colwise_gather_output",
        "replicated",
        "replicated_with_grad_allreduce",
        "rowwise_split_input",
        "sequence",
        "vocab",
        "vocab_head",
    }
)
# A module may compute in single precision whatever it is given, and a matrix product of other sizes rounds otherwise.
# What is cut wrongly is off by as much as the numbers themselves, as weights and input are random.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the plan says of one module, with names as in that module."""

    entries: tuple[PlannedEntry, ...]
    attributes: tuple[AttributeChange, ...]


@dataclass(slots=True)
class _Recorded:
    """What a module gave, and what its row-parallel layers were given and gave, call by call."""

    inputs: torch.Tensor
    arguments: dict[str, object]
    output: list[torch.Tensor] = field(default_factory=list)
    calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)


def prove_users_plan(plan: TensorParallelPlan, model: nn.Module, tp_size: int) -> tuple[str, ...]:
    """Runs every module whose layers a user's plan splits, whole and in parts.

    Args:
        plan: The user's, checked and complete.
        model: The user's, maybe without memory. It is not changed.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        Which modules could not be run, and why, so that the plan is taken as it is.

    Raises:
        ConfigError: A module computes something else in parts, or raises.
    """
    layers = [layer for stack in plan.stacks or find_stacks(model) for layer in stack]
    notes: dict[str, None] = {}
    known: set[tuple[object, ...]] = set()
    for name in _modules_to_run(plan, model):
        part = _part_of(name, plan)
        prefix = f"{name}." if name else ""
        module = model.get_submodule(name)
        kind = kind_of(module, tuple(map(repr, (*part.entries, *part.attributes))))
        if any(layer.startswith(prefix) for layer in layers):
            reason: str | None = "it holds whole layers, which are not run"
        elif kind in known:
            continue
        else:
            known.add(kind)
            reason = _prove(name, module, part, tp_size)
        if reason is not None:
            of = generalized(name) if name else type(model).__name__
            notes[f"{of} is split as the plan says, unproven: {reason}"] = None
    return tuple(notes)


def _modules_to_run(plan: TensorParallelPlan, model: nn.Module) -> list[str]:
    """Returns the modules that hold layers which split features and the layers that sum them, the inner ones first."""
    stacks = plan.stacks or find_stacks(model)
    layers = [entry for entry in plan.entries if not entry.is_parameter]
    columns = [entry for entry in layers if entry.style in OPEN_STYLES]
    rows = [entry for entry in layers if entry.style in CLOSING_STYLES]
    found: dict[str, None] = {}
    for entries, others in ((columns, rows), (rows, columns)):
        for entry in entries:
            found[_common_owner([entry, *entries_near(entry, others, stacks)])] = None
    return sorted(found, key=lambda name: -len(name.split(".")) if name else 0)


def _common_owner(entries: list[PlannedEntry]) -> str:
    """Returns the name of the innermost module that holds all of these."""
    owners = [entry.name.split(".")[:-1] for entry in entries]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
    return ".".join(parts[0] for parts in common)


def _part_of(name: str, plan: TensorParallelPlan) -> _Part:
    prefix = f"{name}." if name else ""

    def local(entry: PlannedEntry) -> PlannedEntry:
        return PlannedEntry(
            name=entry.name.removeprefix(prefix),
            style=entry.style,
            blocks=entry.blocks,
            dim=entry.dim,
            is_parameter=entry.is_parameter,
        )

    changes = [
        AttributeChange(
            module=f"{change.module}.".removeprefix(prefix).removesuffix("."),
            attribute=change.attribute,
            block=change.block,
            counts=change.counts,
            divisor=change.divisor,
        )
        for change in plan.attributes
        if f"{change.module}.".startswith(prefix)
    ]
    entries = tuple(local(entry) for entry in plan.entries if entry.name.startswith(prefix))
    return _Part(entries=entries, attributes=tuple(changes))


def _prove(name: str, module: nn.Module, part: _Part, tp_size: int) -> str | None:
    """Raises if a module computes something else in parts; returns why that can't be told, if it can't."""
    for entry in part.entries:
        if entry.is_parameter or entry.style not in _CUT | CLOSING_STYLES | _WHOLE_OUTSIDE:
            return f"{entry.style!r} of {generalized(entry.name)} needs the other ranks"
    try:
        copied = doubled(module)
    except RuntimeError as error:  # of torch: a computed tensor is kept as an attribute, as weight_norm does
        return f"it can't be copied ({_first_line(error)})"
    whole = _run_whole(copied, part)
    if isinstance(whole, str):
        return whole
    for rank in sorted({0, tp_size // 2, tp_size - 1}):
        fault = _fault_of_rank(copied, part, whole, tp_size, rank)
        if fault is not None:
            _refuse(name, module, part, fault, tp_size)
    return None


def _run_whole(copied: nn.Module, part: _Part) -> _Recorded | str:
    given = samples(copied)
    if isinstance(given, str):
        return given
    arguments, inputs = given
    reason = ""
    for one in inputs:
        recorded = _Recorded(one, arguments)
        try:
            recorded.output = run(_recording(copied, part, recorded), one, arguments)
            again = run(_shared_copy(copied), one, arguments, seed=3)
        except Exception as error:  # a user's forward may raise anything
            reason = reason or f"{type(error).__name__}: {_first_line(error)}"
            continue
        if not equal(recorded.output, again, _TOLERANCE):
            return "what it gives is random, or not finite"
        return recorded
    return f"it can't be run alone on a tensor of (batch, length, features) ({reason})"


def _recording(copied: nn.Module, part: _Part, recorded: _Recorded) -> nn.Module:
    module = _shared_copy(copied)
    for entry in part.entries:
        if entry.style in CLOSING_STYLES:
            calls = recorded.calls.setdefault(entry.name, [])
            module.get_submodule(entry.name).register_forward_hook(
                lambda _, given, output, calls=calls: calls.append((given[0].clone(), output.clone()))
            )
    return module


def _shared_copy(module: nn.Module) -> nn.Module:
    """Returns a copy with the same parameters, as large ones need not be there twice."""
    return copy.deepcopy(module, {id(one): one for one in module.parameters()})


def _fault_of_rank(copied: nn.Module, part: _Part, whole: _Recorded, num_ranks: int, rank: int) -> str | None:
    """Returns what is wrong on a rank; None: nothing is."""
    module = _shared_copy(copied)
    faults: list[str] = []
    for entry in part.entries:
        layer = module.get_submodule(entry.name)
        if entry.style in _CUT:
            cut_layer(layer, entry.style, entry.blocks, num_ranks, rank)
        elif entry.style in CLOSING_STYLES and whole.calls[entry.name]:
            layer.forward = _SummedRow(entry, whole.calls[entry.name], faults, num_ranks, rank)  # type: ignore[assignment]
    for change in part.attributes:
        value = change.local_value(num_ranks, rank)
        setattr(module.get_submodule(change.module), change.attribute, value)
    try:
        output = run(module, whole.inputs, whole.arguments)
    except Exception as error:  # a user's forward may raise anything
        return faults[0] if faults else f"it raises {type(error).__name__}: {_first_line(error)}"
    if faults:
        return faults[0]
    return None if equal(output, whole.output, _TOLERANCE) else "what it gives is not what the whole module gives"


class _SummedRow:
    """Stands for a row-parallel layer on one rank: looks at its input, and gives what the sum over all ranks would."""

    def __init__(
        self,
        entry: PlannedEntry,
        calls: list[tuple[torch.Tensor, torch.Tensor]],
        faults: list[str],
        num_ranks: int,
        rank: int,
    ) -> None:
        self._entry = entry
        self._calls: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(calls)
        self._faults = faults
        self._place = num_ranks, rank

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        whole, output = next(self._calls)
        wanted = _split_input(self._entry, whole, *self._place)
        if not equal(given, wanted, _TOLERANCE):
            self._faults.append(self._said(given, whole, wanted))
        return output

    def _said(self, given: torch.Tensor, whole: torch.Tensor, wanted: torch.Tensor) -> str:
        row = f"{self._entry.name!r} ({self._entry.style})"
        if given.shape[-1:] == whole.shape[-1:] and whole.shape[-1] != wanted.shape[-1]:
            return f"{row} is given all {whole.shape[-1]} features, which no colwise layer before it has split"
        return f"{row} is not given its rank's features of what the whole module gives it"


def _split_input(entry: PlannedEntry, whole: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    """Returns a rank's part of a row-parallel layer's input."""
    return split_layout(whole.shape, whole.ndim - 1, entry.blocks, num_ranks, rank).cut(whole)


def _refuse(name: str, module: nn.Module, part: _Part, fault: str, tp_size: int) -> None:
    where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    given = ", ".join(f"{one.name!r}: {one.style!r}" for one in part.entries if one.style in _CUT | CLOSING_STYLES)
    hints = " ".join(f"({index}) {hint}" for index, hint in enumerate(_hints(module, part, fault), 1))
    raise ConfigError(
        f"the plan splits {where}, as {{{given}}}, but run over {tp_size} ranks it does not compute what it computes"
        f" whole: {fault}. What can be done: {hints}"
    )


def _hints(module: nn.Module, part: _Part, fault: str) -> Iterator[str]:
    """Yields what to write instead, the likeliest first."""
    layers = {one.name: module.get_submodule(one.name) for one in part.entries if one.style in OPEN_STYLES}
    swapped = (
        "if 'colwise' and 'rowwise' are swapped, exchange them: 'colwise' is for the layers that run first, 'rowwise'"
        " for the one that takes their output."
    )
    if "which no colwise layer" in fault:
        yield swapped
    inputs = [feature_sizes(module.get_submodule(one.name))[0] for one in part.entries if one.style in CLOSING_STYLES]
    plain = {one.name for one in part.entries if one.style == "colwise"}
    for key, layer in layers.items():
        outputs = feature_sizes(layer)[1] if is_linear(layer) else 0
        times = [outputs // size for size in inputs if outputs % size == 0 and outputs > size]
        if key in plain and times:
            yield (
                f"if {key!r} gives several projections behind each other (query, key and value; gate and up), write"
                f" 'packed_colwise:{times[0]}' for it."
            )
    yield f"{SIZES_OF_THE_WHOLE}."
    if "which no colwise layer" not in fault and fault.startswith("it raises"):
        yield swapped
    yield "leave the module's layers out of the plan, so that they stay whole."


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
