"""What a tensor-parallel plan means on a grid of ranks, and what of a model a grid can't divide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.core.layer_stacks import stack_layer_of
from booster.core.shard_spec import Box, ShardSpec
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.linear import has_plain_forward
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import sharded_spec
from booster.plugins.hybrid_parallel.tp_plan.adapters import without_adapters
from booster.plugins.hybrid_parallel.tp_plan.attention_heads import owner_of
from booster.plugins.hybrid_parallel.tp_plan.plan import (
    CLOSING_STYLES,
    OPEN_STYLES,
    PlannedEntry,
    TensorParallelPlan,
    feature_sizes,
    generalize,
    module_order,
)

from .grid import TensorGridShape

FEATURE_WISE = "feature_wise"
"""Style of modules with one value per feature, such as norms, which see blocks of activations."""

_PER_HEAD = "embedding_colwise"  # position biases with one feature per head
_LINEAR = OPEN_STYLES | CLOSING_STYLES
_IN_BLOCKS = _LINEAR | {_PER_HEAD, "replicated_with_grad_allreduce"}


def is_on_grid(entry: PlannedEntry) -> bool:
    """Whether a module's parameters are divided over a grid, rather than over all of its ranks in a row."""
    return not entry.is_parameter and entry.style in _LINEAR | {_PER_HEAD, FEATURE_WISE}


def plan_for_grid(plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape) -> TensorParallelPlan:
    """Return the plan with the stacks that run on blocks of activations, and entries of feature-wise modules in them.

    Of another stack, some module of which needs all examples or features, only modules that contain pairs of linear
    layers run on blocks, each on its own; a note says which module that is. Pairs elsewhere divide the input of the
    first layer, and assemble the output of the second one.

    Args:
        plan: Plan of the model for `grid.side` ranks.
        model: The user's model, possibly on the meta device. It is not changed.
        grid: The grid.

    Raises:
        ConfigError: Something of the model can't be divided over the grid.
    """
    with without_adapters(model) as wrappers:
        if wrappers:
            raise ConfigError(
                f"{next(iter(wrappers))!r} has adapters, whose inner features tp_mode={grid.mode!r} does not divide:"
                " use tp_mode='1d', which trains adapters on any layers"
            )
    for entry in plan.entries:
        if is_on_grid(entry):
            _check_divisible(entry, model, grid)
        elif not entry.is_parameter and isinstance(model.get_submodule(entry.name), _BatchNorm):
            raise ConfigError(
                f"{entry.name!r} is a {type(model.get_submodule(entry.name)).__name__} between sharded layers, whose"
                f" statistics are of all examples, which tp_mode={grid.mode!r} divides: use tp_mode='1d'"
            )
    divided: list[tuple[str, ...]] = []
    feature_wise: list[str] = []
    notes = list(plan.notes)
    for stack in plan.stacks:
        if not any(is_on_grid(entry) and stack_layer_of(entry.name, (stack,)) for entry in plan.entries):
            continue
        found, obstacle = _feature_wise_modules(stack, plan, model, grid)
        if obstacle is None:
            divided.append(stack)
            feature_wise += found
            continue
        notes.append(f"{generalize(stack[0])}: activations are divided within pairs of layers only: {obstacle}")
        for region in _regions(stack, plan):
            found, obstacle = _feature_wise_modules((region,), plan, model, grid)
            if obstacle is None:
                divided.append((region,))
                feature_wise += found
    for entry in plan.entries:
        _check_heads(entry, divided, grid)
    entries = list(plan.entries)
    entries += [PlannedEntry(name=name, style=FEATURE_WISE, reason="runs on divided features") for name in feature_wise]
    order = module_order(model)
    entries.sort(key=lambda one: order(one.name))
    return replace(plan, entries=tuple(entries), divided_stacks=tuple(divided), notes=tuple(notes))


def grid_spec(
    entry: PlannedEntry, own_name: str, shape: tuple[int, ...], grid: TensorGridShape, rank: int
) -> ShardSpec:
    """Return the shard spec of a parameter of a module that is on a grid.

    Args:
        entry: The module's entry.
        own_name: Name of the parameter in the module.
        shape: Shape of the logical parameter.
        grid: The grid.
        rank: Tensor-parallel rank.
    """
    coordinates, is_second = grid.coordinates(rank), entry.style in CLOSING_STYLES
    inner, outer, is_bias = grid.inner.features, grid.outer.features, own_name == "bias"
    if entry.style == FEATURE_WISE or (is_second and is_bias):  # one value per feature, in the outer layout
        spec, used = _narrowed(ShardSpec.unsharded(shape), 0, coordinates[outer], grid.side), {outer}
    elif entry.style == _PER_HEAD or is_bias:  # one value per feature between the two layers of a pair, or per head
        dim = 0 if is_bias else entry.dim
        spec, used = sharded_spec(shape, dim, entry.blocks, grid.side, coordinates[inner]), {inner}
    else:  # `entry.dim` has the features between the two layers of a pair
        layout, other = grid.weight(is_second=is_second), 1 - entry.dim
        inner, outer = (layout.inputs, layout.outputs) if is_second else (layout.outputs, layout.inputs)
        spec, used = sharded_spec(shape, entry.dim, entry.blocks, grid.side, coordinates[inner]), {inner, outer}
        spec = _narrowed(spec, other, coordinates[outer], grid.side)
        if layout.rows is not None:
            spec = _narrowed(spec, other if is_second else entry.dim, coordinates[layout.rows], grid.side)
            used.add(layout.rows)
    # Ranks along the other axes hold the same; coordinate 0 is primary.
    is_replica = any(index for axis, index in coordinates.items() if axis not in used)
    return spec.non_primary() if is_replica else spec


def _narrowed(spec: ShardSpec, dim: int, index: int, num_shards: int) -> ShardSpec:
    """Return the spec of one of equal parts of the local tensor along a dimension."""
    length = spec.local_shape[dim] // num_shards
    start, regions = index * length, []
    for region in spec.regions:
        (local, size), (logical, _) = region.local[dim], region.logical[dim]
        first, last = max(local, start), min(local + size, start + length)
        if first < last:
            here = _with(region.local, dim, (first - start, last - first))
            there = _with(region.logical, dim, (logical + first - local, last - first))
            regions.append(replace(region, local=here, logical=there))
    local_shape = (*spec.local_shape[:dim], length, *spec.local_shape[dim + 1 :])
    return replace(spec, local_shape=local_shape, regions=tuple(regions))


def _with(box: Box, dim: int, span: tuple[int, int]) -> Box:
    return (*box[:dim], span, *box[dim + 1 :])


def activation_shapes(
    entry: PlannedEntry, module: nn.Module, grid: TensorGridShape | None, num_ranks: int, batch_size: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes (examples, features) of a linear layer's input and output on each rank, but for other dims.

    Args:
        entry: Entry of a linear layer of a pair.
        module: The unsharded layer.
        grid: The grid, None in the mode "1d".
        num_ranks: Number of tensor-parallel ranks.
        batch_size: Number of examples of a batch.
    """
    inputs, outputs = feature_sizes(module)
    is_second = entry.style in CLOSING_STYLES
    side = num_ranks if grid is None else grid.side
    outer = (batch_size, outputs if is_second else inputs)
    inner = (batch_size, (inputs if is_second else outputs) // side)
    if grid is not None:
        examples = -(-batch_size // grid.num_batch_shards)
        outer, inner = (examples, outer[1] // side), (examples, inner[1])
    return (inner, outer) if is_second else (outer, inner)


def _check_divisible(entry: PlannedEntry, model: nn.Module, grid: TensorGridShape) -> None:
    for block in entry.blocks:
        counts = {
            "heads or features": block.num_units,
            "query heads": block.num_query_units,
            "groups": block.num_groups,
        }
        for what, size in counts.items():
            if size is not None:
                _check_size(f"{entry.name!r} has {size} {what}", size, grid.side, grid)
    if entry.style == _PER_HEAD:
        return
    module = model.get_submodule(entry.name)
    if not has_plain_forward(type(module)):
        raise ConfigError(
            f"{entry.name!r} is a {type(module).__name__}, whose forward is its own, but tp_mode={grid.mode!r} replaces"
            " the product of a linear layer: use tp_mode='1d', or an nn.Linear"
        )
    inputs, outputs = feature_sizes(module)
    is_second = entry.style in CLOSING_STYLES
    hidden, what = (outputs, "outputs") if is_second else (inputs, "inputs")
    _check_size(f"{entry.name!r} has {hidden} {what}", hidden, grid.side, grid)
    if grid.mode == "3d":
        _check_size(f"{entry.name!r} has {outputs} outputs", outputs, grid.side**2, grid)


def _check_heads(entry: PlannedEntry, divided: Sequence[tuple[str, ...]], grid: TensorGridShape) -> None:
    """Check that heads are inside of a module that runs on blocks: attention reshapes by the examples of its input."""
    has_heads = any(block.unit_size > 1 for block in entry.blocks) or entry.style == _PER_HEAD
    if is_on_grid(entry) and has_heads and stack_layer_of(entry.name, tuple(divided)) is None:
        raise ConfigError(
            f"{entry.name!r} computes heads outside of a module that tp_mode={grid.mode!r} can give its own examples:"
            " use tp_mode='1d', or put attention in a module of its own, inside of a layer of an nn.ModuleList"
        )


def _check_size(what: str, size: int, num_shards: int, grid: TensorGridShape) -> None:
    if size % num_shards == 0:
        return
    below = size // num_shards * num_shards
    nearest = f"{below} or {below + num_shards}" if below else f"{num_shards}"
    raise ConfigError(
        f"{what}, which tp_mode={grid.mode!r} on {grid.num_ranks} ranks can't divide into {num_shards} equal parts: use"
        f" {nearest}, or tp_mode='1d', which divides unevenly, too"
    )


def _feature_wise_modules(
    stack: tuple[str, ...], plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape
) -> tuple[list[str], str | None]:
    """Return the names of the modules in a stack that have one value per feature, and what keeps it undivided, if any.

    Raises:
        ConfigError: The layout of such a module in a cube is unknown.
    """
    planned = {entry.name: entry for entry in plan.entries}
    found: list[str] = []
    for entry in plan.entries:
        is_inside = stack_layer_of(entry.name, (stack,)) is not None
        if is_inside and (entry.is_parameter or entry.style not in _IN_BLOCKS):
            return [], f"{generalize(entry.name)} is {entry.style}"
    for name in stack:
        firsts = (one.name for one in plan.entries if one.style in OPEN_STYLES and not one.is_parameter)
        first = next((one for one in firsts if one.startswith(f"{name}.")), None)
        hidden = None if first is None else feature_sizes(model.get_submodule(first))[0]  # between pairs of layers
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            own = dict(module.named_parameters(recurse=False))
            is_planned = any(outer in planned for outer in _ancestors(inner, name))
            if is_planned or not (own or isinstance(module, _BatchNorm)):
                continue
            is_feature_wise = all(tuple(parameter.shape) == (hidden,) for parameter in own.values())
            if not is_feature_wise or isinstance(module, _BatchNorm) or inner == name:
                return [], f"{generalize(inner)}, a {type(module).__name__}, is not in the plan"
            _check_layout(inner, name, hidden, plan, model, grid)
            found.append(inner)
    return found, None


def _check_layout(
    name: str, layer: str, hidden: int | None, plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape
) -> None:
    """Check that a feature-wise module can't be between the two linear layers of a pair on a cube."""
    if grid.mode != "3d":
        return
    for entry in plan.entries:
        region = owner_of(entry.name)
        is_around = region in _ancestors(name, layer)[:-1]
        if entry.style in OPEN_STYLES and is_around and feature_sizes(model.get_submodule(entry.name))[1] == hidden:
            raise ConfigError(
                f"{name!r} has one value per feature inside of {region!r}, which has {hidden} features outside and"
                " inside, so tp_mode='3d' can't know how they are divided there: use tp_mode='2d' or '1d'"
            )


def _regions(stack: tuple[str, ...], plan: TensorParallelPlan) -> list[str]:
    """Return the smallest modules inside of a stack's layers that contain a first layer of a pair and a second one."""
    found: dict[str, None] = {}
    for entry in plan.entries:
        layer = stack_layer_of(entry.name, (stack,))
        if layer is None or entry.style not in OPEN_STYLES or entry.is_parameter:
            continue
        for outer in _ancestors(owner_of(entry.name), layer)[:-1]:
            if any(one.style in CLOSING_STYLES and one.name.startswith(f"{outer}.") for one in plan.entries):
                found[outer] = None
                break
    return list(found)


def _ancestors(name: str, layer: str) -> list[str]:
    """Return the names of a module and of those around it up to a layer, from the inside."""
    found = [name]
    while found[-1] != layer:
        found.append(found[-1].rpartition(".")[0])
    return found
