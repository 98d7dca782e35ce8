"""Verify a user's plan: every module whose layers it shards is run in shards, and compared with the whole one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from booster.core.layer_stacks import find_stacks
from booster.errors import ConfigError, first_line
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import sharded_spec

from .equivalence_check import (
    UNSHARDED_SIZES_HINT,
    adds_up,
    all_close,
    module_signature,
    record_calls,
    run,
    shard_layer,
    try_inputs,
)
from .plan import (
    CLOSING_STYLES,
    OPEN_STYLES,
    SHARDED_STYLES,
    PlannedEntry,
    TensorParallelPlan,
    feature_sizes,
    generalize,
)
from .validate import nearby_entries

_SHARDED_OUTPUT = OPEN_STYLES | {"embedding_colwise"}
# Styles with the same inputs and outputs as without sharding.
_UNSHARDED_BOUNDARY = (SHARDED_STYLES - _SHARDED_OUTPUT - CLOSING_STYLES) | {
    *("replicated", "replicated_with_grad_allreduce", "sequence")
}
# A module may compute in single precision internally, and matmuls of other sizes round differently. The error of a
# wrong split is as large as the values themselves, as weights and inputs are random.
_USER_PLAN_TOLERANCE = 1e-4


class _ReferenceRun:
    """Reference run of a module: its output, and the input and output of each call of its row-parallel layers."""

    def __init__(
        self, module_plan: TensorParallelPlan, module: nn.Module, inputs: torch.Tensor, arguments: Mapping[str, object]
    ) -> None:
        self.module, self.inputs, self.arguments = module, inputs, arguments
        rows = [entry.name for entry in module_plan.entries if entry.style in CLOSING_STYLES]
        self.output, recorded = record_calls(_shared_copy(module), rows, inputs, arguments)
        self.calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {
            name: [(given[0], output) for given, output in calls] for name, calls in recorded.items()
        }
        again = run(_shared_copy(module), inputs, arguments, seed=3)
        self.is_repeatable = all_close(self.output, again, _USER_PLAN_TOLERANCE)


def verify_user_plan(plan: TensorParallelPlan, model: nn.Module, tp_size: int) -> tuple[str, ...]:
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
    for name in modules_to_run(plan, model):
        module_plan = _module_plan(name, plan)
        prefix = f"{name}." if name else ""
        module = model.get_submodule(name)
        kind = module_signature(module, tuple(map(repr, (*module_plan.entries, *module_plan.attributes))))
        if any(layer.startswith(prefix) for layer in layers):
            reason: str | None = "it contains full layers of a stack, which are not run"
        elif kind in known:
            continue
        else:
            known.add(kind)
            reason = _verify(name, module, module_plan, tp_size)
        if reason is not None:
            label = generalize(name) if name else type(model).__name__
            notes[f"{label} is sharded by the plan without verification: {reason}"] = None
    return tuple(notes)


def modules_to_run(plan: TensorParallelPlan, model: nn.Module) -> list[str]:
    """Return the modules that contain column-parallel layers and their row-parallel layers, the inner ones first."""
    stacks = plan.stacks or find_stacks(model)
    layers = [entry for entry in plan.entries if not entry.is_parameter]
    columns = [entry for entry in layers if entry.style in OPEN_STYLES]
    rows = [entry for entry in layers if entry.style in CLOSING_STYLES]
    found: dict[str, None] = {}
    for entries, others in ((columns, rows), (rows, columns)):
        for entry in entries:
            owners = [one.name.split(".")[:-1] for one in (entry, *nearby_entries(entry, others, stacks))]
            common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
            found[".".join(parts[0] for parts in common)] = None
    return sorted(found, key=lambda name: -len(name.split(".")) if name else 0)


def _module_plan(name: str, plan: TensorParallelPlan) -> TensorParallelPlan:
    """Return the part of a plan for a module, with names relative to it."""
    prefix = f"{name}." if name else ""
    entries = [
        replace(entry, name=entry.name.removeprefix(prefix), region="", siblings=(), reason="")
        for entry in plan.entries
        if entry.name.startswith(prefix)
    ]
    changes = [
        replace(change, module=f"{change.module}.".removeprefix(prefix).removesuffix("."))
        for change in plan.attributes
        if f"{change.module}.".startswith(prefix)
    ]
    return TensorParallelPlan(entries=tuple(entries), attributes=tuple(changes))


def _verify(name: str, module: nn.Module, module_plan: TensorParallelPlan, tp_size: int) -> str | None:
    """Raise if a module computes different results in shards; return a reason if it cannot be verified."""
    for entry in module_plan.entries:
        if entry.is_parameter or entry.style not in _SHARDED_OUTPUT | CLOSING_STYLES | _UNSHARDED_BOUNDARY:
            return f"{entry.style!r} of {generalize(entry.name)} needs communication with other ranks"
    reference = try_inputs(module, partial(_ReferenceRun, module_plan))
    if isinstance(reference, str):
        return reference
    if not reference.is_repeatable:
        return "its output is random or not finite"
    for entry in module_plan.entries:
        layer = reference.module.get_submodule(entry.name)
        for given, output in reference.calls.get(entry.name, ()) if is_linear(layer) else ():
            if not adds_up(layer, entry.blocks, given, output, _USER_PLAN_TOLERANCE):
                own = f"{entry.name!r} ({entry.style}) has a forward of its own, of which shards do not add up"
                _raise_mismatch(name, module, module_plan, own, tp_size)
    for rank in sorted({0, tp_size // 2, tp_size - 1}):
        mismatch = _find_mismatch(module_plan, reference, tp_size, rank)
        if mismatch is not None:
            _raise_mismatch(name, module, module_plan, mismatch, tp_size)
    return None


def _shared_copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters, to save memory."""
    return copy.deepcopy(module, {id(one): one for one in module.parameters()})


def _find_mismatch(module_plan: TensorParallelPlan, reference: _ReferenceRun, num_ranks: int, rank: int) -> str | None:
    module = _shared_copy(reference.module)
    mismatches: list[str] = []
    for entry in module_plan.entries:
        layer = module.get_submodule(entry.name)
        if entry.style in _SHARDED_OUTPUT:
            shard_layer(layer, entry.style, entry.blocks, num_ranks, rank)
        elif entry.name in reference.calls:
            layer.forward = _reduced_row(entry, reference.calls[entry.name], mismatches, num_ranks, rank)
    for change in module_plan.attributes:
        change.apply(module, num_ranks, rank)
    try:
        output = run(module, reference.inputs, reference.arguments)
    except Exception as error:  # a user's forward may raise anything
        return mismatches[0] if mismatches else f"it raises {type(error).__name__}: {first_line(error)}"
    if mismatches:
        return mismatches[0]
    is_equal = all_close(output, reference.output, _USER_PLAN_TOLERANCE)
    return None if is_equal else "its output differs from that of the unsharded module"


def _reduced_row(
    entry: PlannedEntry,
    calls: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mismatches: list[str],
    num_ranks: int,
    rank: int,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a row-parallel layer's forward that checks its input, and returns the recorded output."""
    remaining = iter(calls)

    def forward(given: torch.Tensor) -> torch.Tensor:
        reference, output = next(remaining)
        expected = sharded_spec(reference.shape, reference.ndim - 1, entry.blocks, num_ranks, rank).shard(reference)
        if not all_close(given, expected, _USER_PLAN_TOLERANCE):
            row = f"{entry.name!r} ({entry.style})"
            mismatch = f"{row} does not get its rank's features of its input in the unsharded module"
            if given.shape[-1:] == reference.shape[-1:] != expected.shape[-1:]:
                count = reference.shape[-1]
                mismatch = f"{row} gets all {count} features, which no colwise layer before it has sharded"
            mismatches.append(mismatch)
        return output

    return forward


def _raise_mismatch(name: str, module: nn.Module, module_plan: TensorParallelPlan, mismatch: str, tp_size: int) -> None:
    where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    given = ", ".join(
        f"{one.name!r}: {one.style!r}" for one in module_plan.entries if one.style in _SHARDED_OUTPUT | CLOSING_STYLES
    )
    hints = " ".join(f"({index}) {hint}" for index, hint in enumerate(_hints(module, module_plan, mismatch), 1))
    raise ConfigError(
        f"the plan shards {where}, as {{{given}}}, but over {tp_size} ranks its results differ from those of the"
        f" unsharded module: {mismatch}. Possible fixes: {hints}"
    )


def _hints(module: nn.Module, module_plan: TensorParallelPlan, mismatch: str) -> Iterator[str]:
    layers = {one.name: module.get_submodule(one.name) for one in module_plan.entries if one.style in OPEN_STYLES}
    swapped = (
        "if 'colwise' and 'rowwise' are swapped, exchange them: 'colwise' is for the layers that run first, 'rowwise'"
        " for the one that reads their output."
    )
    if "which no colwise layer" in mismatch:
        yield swapped
    inputs = [
        feature_sizes(module.get_submodule(one.name))[0] for one in module_plan.entries if one.style in CLOSING_STYLES
    ]
    plain = {one.name for one in module_plan.entries if one.style == "colwise"}
    for key, layer in layers.items():
        outputs = feature_sizes(layer)[1] if is_linear(layer) else 0
        times = [outputs // size for size in inputs if outputs % size == 0 and outputs > size]
        if key in plain and times:
            yield (
                f"if {key!r} returns several consecutive projections (query, key and value; gate and up), write"
                f" 'packed_colwise:{times[0]}' for it."
            )
    yield f"{UNSHARDED_SIZES_HINT}."
    if "which no colwise layer" not in mismatch and mismatch.startswith("it raises"):
        yield swapped
    yield "leave the module's layers out of the plan, so that they are not sharded."
