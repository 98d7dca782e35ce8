"""Verify a user's plan by running modules in shards, as far as they can be run alone. See Note [Probing]."""

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
_WHOLE_OUTSIDE = frozenset(  # styles with the same inputs and outputs as without sharding
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
# A module may compute in single precision internally, and matmuls of other sizes round differently. The error of a
# wrong split is as large as the values themselves, as weights and inputs are random.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The plan of one module, with names relative to it."""

    entries: tuple[PlannedEntry, ...]
    attributes: tuple[AttributeChange, ...]


@dataclass(slots=True)
class _Recorded:
    """Reference run of a module: its output, and the input and output of each call of its row-parallel layers."""

    inputs: torch.Tensor
    arguments: dict[str, object]
    output: list[torch.Tensor] = field(default_factory=list)
    calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)


def prove_users_plan(plan: TensorParallelPlan, model: nn.Module, tp_size: int) -> tuple[str, ...]:
    """Run every module whose layers a user's plan shards, unsharded and in shards.

    Args:
        plan: The user's plan, checked and resolved.
        model: The user's model, possibly on the meta device. It is not changed.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        Notes about modules that could not be run, for which the plan is used unverified.

    Raises:
        ConfigError: A module raises or computes different results in shards.
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
            reason: str | None = "it contains full layers of a stack, which are not run"
        elif kind in known:
            continue
        else:
            known.add(kind)
            reason = _prove(name, module, part, tp_size)
        if reason is not None:
            of = generalized(name) if name else type(model).__name__
            notes[f"{of} is sharded by the plan without verification: {reason}"] = None
    return tuple(notes)


def _modules_to_run(plan: TensorParallelPlan, model: nn.Module) -> list[str]:
    """Return the modules that contain column-parallel layers and their row-parallel layers, the inner ones first."""
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
    """Raise if a module computes different results in shards; return a reason if it cannot be verified."""
    for entry in part.entries:
        if entry.is_parameter or entry.style not in _CUT | CLOSING_STYLES | _WHOLE_OUTSIDE:
            return f"{entry.style!r} of {generalized(entry.name)} needs communication with other ranks"
    try:
        copied = doubled(module)
    except RuntimeError as error:  # torch refuses to copy non-leaf tensors in attributes, as weight_norm has
        return f"it cannot be copied ({_first_line(error)})"
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
            return "its output is random or not finite"
        return recorded
    return f"it cannot be run alone on a tensor of (batch, length, features) ({reason})"


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
    """Return a copy that shares the parameters, to save memory."""
    return copy.deepcopy(module, {id(one): one for one in module.parameters()})


def _fault_of_rank(copied: nn.Module, part: _Part, whole: _Recorded, num_ranks: int, rank: int) -> str | None:
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
    return None if equal(output, whole.output, _TOLERANCE) else "its output differs from that of the unsharded module"


class _SummedRow:
    """Replacement of a row-parallel layer's forward: checks its input, and returns the recorded output."""

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
            return f"{row} gets all {whole.shape[-1]} features, which no colwise layer before it has sharded"
        return f"{row} does not get its rank's features of its input in the unsharded module"


def _split_input(entry: PlannedEntry, whole: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    return split_layout(whole.shape, whole.ndim - 1, entry.blocks, num_ranks, rank).cut(whole)


def _refuse(name: str, module: nn.Module, part: _Part, fault: str, tp_size: int) -> None:
    where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    given = ", ".join(f"{one.name!r}: {one.style!r}" for one in part.entries if one.style in _CUT | CLOSING_STYLES)
    hints = " ".join(f"({index}) {hint}" for index, hint in enumerate(_hints(module, part, fault), 1))
    raise ConfigError(
        f"the plan shards {where}, as {{{given}}}, but over {tp_size} ranks its results differ from those of the"
        f" unsharded module: {fault}. Possible fixes: {hints}"
    )


def _hints(module: nn.Module, part: _Part, fault: str) -> Iterator[str]:
    layers = {one.name: module.get_submodule(one.name) for one in part.entries if one.style in OPEN_STYLES}
    swapped = (
        "if 'colwise' and 'rowwise' are swapped, exchange them: 'colwise' is for the layers that run first, 'rowwise'"
        " for the one that reads their output."
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
                f"if {key!r} returns several consecutive projections (query, key and value; gate and up), write"
                f" 'packed_colwise:{times[0]}' for it."
            )
    yield f"{SIZES_OF_THE_WHOLE}."
    if "which no colwise layer" not in fault and fault.startswith("it raises"):
        yield swapped
    yield "leave the module's layers out of the plan, so that they are not sharded."


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
