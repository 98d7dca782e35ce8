"""Construction of a stage model: drops the modules of other stages, and runs the model's own forward on the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import ShardSpec
from booster.moe.routers import Router

from .placeholders import PlaceholderModules
from .stage_forward import (
    ChunkContext,
    PersistentBuffer,
    SharedBuffers,
    forget_forward_attributes,
    install_layer,
    install_skip_output,
    persistent_buffers,
)
from .stage_partition.stage_plan import ModelChunk, StagePartition


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageModel:
    """Model of one stage.

    Attributes:
        partition: Assignment of the model's layers to stages.
        chunks: Model chunks of this stage.
        parameters: Parameters of the full model by logical name, the first name in the user's model. Those of other
            stages are on the meta device.
        held: Logical names of this stage's parameters.
        logical_names: Logical names of this stage's parameters, by their names in the stage model.
        groups: Logical names in each of the optimizer's param groups.
        holders: Stages, ascending, of each parameter that is on several of them, such as tied embeddings, by logical
            name, in an order equal on all ranks. The first stage is the primary owner and writes it.
        layouts: Shard spec of each parameter.
        context: State of the chunk forward that is running.
        placeholders: Placeholders of the modules of other stages.
        buffers: Persistent buffers of the full model, by each of their names.
        tied: Further names of each tied parameter or persistent buffer, by its first name.
    """

    partition: StagePartition
    chunks: Sequence[ModelChunk]
    parameters: Mapping[str, nn.Parameter]
    held: frozenset[str]
    logical_names: Mapping[str, str]
    groups: Sequence[Sequence[str]]
    holders: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, ShardSpec]
    context: ChunkContext
    placeholders: PlaceholderModules
    buffers: Mapping[str, PersistentBuffer]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def build_stage(
    model: nn.Module,
    optimizer: Optimizer | None,
    layouts: Mapping[str, ShardSpec],
    partition: StagePartition,
    stage: int,
    device: torch.device,
    shard: Callable[[Mapping[str, ShardSpec], Collection[int]], dict[str, nn.Parameter]],
) -> StageModel:
    """Materialize the model's parameters, and keep this stage's, sharded by their specs. In place. Collective.

    Modules are materialized one at a time, so that no rank ever holds the full model.

    Args:
        model: The user's model.
        optimizer: The user's optimizer; parameters of other stages are removed from its param groups.
        layouts: Shard spec of each parameter by name, tied ones once.
        partition: Assignment of the model's layers to stages.
        stage: Index of this stage.
        device: Compute device of the stage.
        shard: Function that shards the parameters, by this stage's shard specs, and drops those of modules of other
            stages, by their `id`s.
    """
    stages_of_module = partition.module_stages(model)
    absent = {key for key, stages in stages_of_module.items() if stage not in stages}
    stages_of = partition.parameter_stages(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(one)] for one in group["params"]] for group in (optimizer.param_groups if optimizer else ())]
    buffers = persistent_buffers(model, partition)
    tied = _tied_names(model) | {one.names[0]: one.names[1:] for one in buffers if len(one.names) > 1}
    holders = {name: stages for name, stages in stages_of.items() if len(stages) > 1}
    owned = {
        name: layout if name not in holders or holders[name][0] == stage else layout.non_primary()
        for name, layout in layouts.items()
    }
    parameters = shard(owned, absent)
    held = frozenset(name for name, stages in stages_of.items() if stage in stages)
    logical = {id(parameter): name for name, parameter in parameters.items()}
    plan = partition.plan
    has_routers = any(isinstance(one, Router) for one in model.modules())
    context = ChunkContext(plan, SharedBuffers(buffers, stage), has_routers)
    return StageModel(
        partition=partition,
        chunks=partition.chunks(stage),
        parameters=parameters,
        held=held,
        logical_names={
            name: logical[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        },
        groups=groups,
        holders=holders,
        layouts=layouts,
        context=context,
        placeholders=PlaceholderModules(context, device),
        buffers={name: one for one in buffers for name in one.names},
        tied=tied,
    )


def install_chunk_forward(model: nn.Module, stage_model: StageModel, stage: int) -> None:
    """Let the model's own forward run the stage's chunks. In place, after all other changes of its layers.

    Args:
        model: The user's model, after `build_stage`.
        stage_model: Result of `build_stage`.
        stage: Index of this stage.
    """
    plan = stage_model.partition.plan
    stages_of_module = stage_model.partition.module_stages(model)
    context, placeholders = stage_model.context, stage_model.placeholders

    def reads_values() -> bool:
        return context.run is None or placeholders.is_on_meta

    for name in plan.gaps:
        module = model.get_submodule(name)
        if stage not in stages_of_module[id(module)]:
            stage_model.placeholders.install(module, name)
            forget_forward_attributes(module, name, reads_values)
    if plan.sequence is not None:
        return
    for index, name in enumerate(plan.layers):
        layer = model.get_submodule(name)
        install_layer(layer, index, stage_model.context)
        if stage not in stages_of_module[id(layer)]:
            forget_forward_attributes(layer, name, reads_values)
    for name, complete_at in plan.skip_outputs.items():
        install_skip_output(model.get_submodule(name), name, complete_at, stage_model.context)


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the further names of each tied parameter, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
