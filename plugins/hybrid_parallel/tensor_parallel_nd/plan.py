"""What a tensor-parallel plan means on a grid of ranks, and what of a model a grid can't divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.core.layer_stacks import stack_layer_of
from booster.core.shard_spec import ShardSpec
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block
from booster.plugins.hybrid_parallel.tp_plan.attention_heads import owner_of
from booster.plugins.hybrid_parallel.tp_plan.plan import PlannedEntry, TensorParallelPlan, feature_sizes
from booster.plugins.hybrid_parallel.tp_plan.resolve import is_cross_attention
from booster.plugins.hybrid_parallel.tp_plan.validate import CLOSING_STYLES, OPEN_STYLES

from .grid import TensorGridShape
from .shard_spec import bias_spec, feature_spec, weight_spec

FEATURE_WISE = "feature_wise"
"""Style of modules with one value per feature, such as norms, which see blocks of activations."""

_INSIDE_OF_STACKS = OPEN_STYLES | CLOSING_STYLES | {"replicated_with_grad_allreduce", FEATURE_WISE}


def is_on_grid(entry: PlannedEntry) -> bool:
    """Whether a module's parameters are divided over a grid, rather than over all of its ranks in a row."""
    return not entry.is_parameter and entry.style in OPEN_STYLES | CLOSING_STYLES | {FEATURE_WISE}


def plan_for_grid(plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape) -> TensorParallelPlan:
    """Return the plan with the entries of feature-wise modules.

    Args:
        plan: Plan of the model for `grid.side` ranks.
        model: The user's model, possibly on the meta device. It is not changed.
        grid: The grid.

    Raises:
        ConfigError: Something of the model can't be divided over the grid.
    """
    if plan.arguments:
        split = plan.arguments[0]
        raise ConfigError(
            f"{split.module!r} has the argument {split.argument!r} with a value per head and example in one dimension,"
            f" which tp_mode={grid.mode!r} can't divide: use tp_mode='1d'"
        )
    for entry in plan.entries:
        _check_entry(entry, plan, model, grid)
    found = [
        PlannedEntry(name=name, style=FEATURE_WISE, reason="runs on divided features")
        for name in _feature_wise_modules(plan, model, grid)
    ]
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    entries = sorted(
        (*plan.entries, *found), key=lambda one: order.get(one.name, order.get(one.name.rpartition(".")[0], 0))
    )
    return replace(plan, entries=tuple(entries))


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
    if entry.style == FEATURE_WISE:
        return feature_spec(shape, grid, rank)
    is_second = entry.style in CLOSING_STYLES
    if own_name == "bias":
        return bias_spec(shape, entry.blocks, grid, rank, is_second=is_second)
    return weight_spec(shape, entry.dim, entry.blocks, grid, rank, is_second=is_second)


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


def _check_entry(entry: PlannedEntry, plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape) -> None:
    layer = stack_layer_of(entry.name, plan.stacks)
    if layer is not None and (entry.is_parameter or entry.style not in _INSIDE_OF_STACKS):
        raise ConfigError(
            f"the plan has {entry.style!r} for {entry.name!r}, which is inside of a layer, where tp_mode={grid.mode!r}"
            " divides examples and features, and has no meaning there: use tp_mode='1d', or a plan of 'colwise' and"
            " 'rowwise' linear layers"
        )
    if layer is not None and is_cross_attention(entry.name):
        raise ConfigError(
            f"{entry.name!r} attends to another stack of layers, whose output tp_mode={grid.mode!r} would have to"
            " divide once more: use tp_mode='1d' for encoder-decoder models"
        )
    if not is_on_grid(entry):
        return
    module = model.get_submodule(entry.name)
    inputs, outputs = feature_sizes(module)
    is_second = entry.style in CLOSING_STYLES
    for block in entry.blocks:
        _check_block(entry.name, block, grid)
    hidden, what = (outputs, "outputs") if is_second else (inputs, "inputs")
    _check_size(f"{entry.name!r} has {hidden} {what}", hidden, grid.side, grid)
    if grid.mode == "3d":
        what, rows = f"{entry.name!r} has {outputs} outputs", outputs
        _check_size(what, rows, grid.side**2, grid)


def _check_block(name: str, block: Block, grid: TensorGridShape) -> None:
    sizes = {"heads or features": block.num_units, "query heads": block.num_query_units, "groups": block.num_groups}
    for what, size in sizes.items():
        if size is not None:
            _check_size(f"{name!r} has {size} {what}", size, grid.side, grid)


def _check_size(what: str, size: int, num_shards: int, grid: TensorGridShape) -> None:
    if size % num_shards == 0:
        return
    below = size // num_shards * num_shards
    nearest = f"{below} or {below + num_shards}" if below else f"{num_shards}"
    raise ConfigError(
        f"{what}, which tp_mode={grid.mode!r} on {grid.num_ranks} ranks can't divide into {num_shards} equal parts: use"
        f" {nearest}, or tp_mode='1d', which divides unevenly, too"
    )


def _feature_wise_modules(plan: TensorParallelPlan, model: nn.Module, grid: TensorGridShape) -> Iterator[str]:
    """Yield the names of the modules in stacks that have one value per feature.

    Raises:
        ConfigError: A module in a stack has other parameters that the plan leaves replicated.
    """
    planned = {entry.name: entry for entry in plan.entries}
    for name in (name for stack in plan.stacks for name in stack):
        layer = model.get_submodule(name)
        hidden = _hidden_size(name, plan, model)
        regions = {
            owner_of(one.name): feature_sizes(model.get_submodule(one.name))[1]
            for one in plan.entries
            if one.style in OPEN_STYLES and one.name.startswith(f"{name}.")
        }
        for inner, module in layer.named_modules(prefix=name):
            own = dict(module.named_parameters(recurse=False))
            is_planned = any(outer in planned for outer in _ancestors(inner, name))
            if is_planned or not (own or isinstance(module, _BatchNorm)):
                continue
            is_feature_wise = all(tuple(parameter.shape) == (hidden,) for parameter in own.values())
            if not is_feature_wise or isinstance(module, _BatchNorm) or inner == name:
                shapes = ", ".join(f"{key} {'x'.join(map(str, one.shape))}" for key, one in own.items())
                raise ConfigError(
                    f"{inner!r} is a {type(module).__name__} with {shapes or 'statistics of the batch'} inside of a"
                    f" layer, where tp_mode={grid.mode!r} divides examples and features, but the plan has no style for"
                    " it: use tp_mode='1d', or give it a style"
                )
            region = next((outer for outer in _ancestors(inner, name)[:-1] if outer in regions), None)
            if grid.mode == "3d" and region is not None and regions[region] == hidden:
                raise ConfigError(
                    f"{inner!r} has one value per feature inside of {region!r}, which has {hidden} features outside and"
                    " inside, so tp_mode='3d' can't know how they are divided there: use tp_mode='2d' or '1d'"
                )
            yield inner


def _hidden_size(layer: str, plan: TensorParallelPlan, model: nn.Module) -> int | None:
    """Return the number of features between a layer's pairs of linear layers."""
    for entry in plan.entries:
        if entry.style in OPEN_STYLES and not entry.is_parameter and entry.name.startswith(f"{layer}."):
            return feature_sizes(model.get_submodule(entry.name))[0]
    return None


def _ancestors(name: str, layer: str) -> list[str]:
    """Return the names of a module and of those around it up to a layer, from the inside."""
    found = [name]
    while found[-1] != layer:
        found.append(found[-1].rpartition(".")[0])
    return found
