"""Leaves of a model what a stage holds, and lets the model's own forward run its pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import ParameterLayout
from booster.plugins.hybrid_parallel.cutting import cut_model
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import Piece, StageDivision
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.running import PieceContext, make_carried, make_unit
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.shared_buffers import (
    PersistentBuffer,
    SharedBuffers,
    persistent_buffers,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stand_ins import StandIns
from booster.plugins.sharding.materializing import Materializer

__all__ = ["CarvedModel", "SharedParameter", "carve", "connect"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedParameter:
    """A parameter that several stages hold, as tied embeddings on the first and the last.

    Attributes:
        name: The logical one.
        parameter: This stage's.
        stages: Those that hold it, in ascending order; the first one counts and writes it.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarvedModel:
    """What a stage has of a model.

    Attributes:
        division: Of the model's units.
        pieces: This stage's.
        parameters: The whole model's by their logical names: the first name of each in the model as the user made it.
            Those that the stage does not hold are on the meta device.
        held: The names of those that it does hold.
        logical_names: Of the parameters that it does hold, by the names that they have in what is left of the model.
        groups: The logical names in each of the optimizer's param groups.
        holders: By logical name the stages of every parameter that several of them hold, in the same order everywhere.
        layouts: What this rank's part of every parameter is, and what of it it writes among those of its stage.
        context: Which piece runs.
        stand_ins: Of modules that the stage does not hold.
        buffers: The whole model's persistent buffers, by each of their names.
        tied: By the first name of each parameter or persistent buffer that has several the others.
    """

    division: StageDivision
    pieces: Sequence[Piece]
    parameters: Mapping[str, nn.Parameter]
    held: frozenset[str]
    logical_names: Mapping[str, str]
    groups: Sequence[Sequence[str]]
    holders: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, ParameterLayout]
    context: PieceContext
    stand_ins: StandIns
    buffers: Mapping[str, PersistentBuffer]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def shared(self) -> list[SharedParameter]:
        """This stage's parameters that other stages hold, too."""
        return [
            SharedParameter(name, self.parameters[name], stages)
            for name, stages in self.holders.items()
            if name in self.held
        ]


def carve(
    model: nn.Module,
    optimizer: Optimizer | None,
    layouts: Mapping[str, ParameterLayout],
    materializer: Materializer,
    division: StageDivision,
    stage: int,
    device: torch.device,
) -> CarvedModel:
    """Gives the model's parameters values, and leaves this stage's, cut by their layouts. In place. Collective.

    Modules are filled one by one, so that no rank ever holds the whole of a model without values.

    Args:
        model: The user's model.
        optimizer: The user's optimizer; its param groups lose what the stage does not hold.
        layouts: What this rank's part of every parameter is, by name, tied ones once.
        materializer: Of the model.
        division: Of the model's units.
        stage: This rank's.
        device: Where the stage computes.
    """
    stages_of_module = division.module_stages(model)
    absent = {key for key, stages in stages_of_module.items() if stage not in stages}
    stages_of = division.parameter_stages(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(one)] for one in group["params"]] for group in (optimizer.param_groups if optimizer else ())]
    buffers = persistent_buffers(model, division)
    tied = _tied_names(model) | {one.names[0]: one.names[1:] for one in buffers if len(one.names) > 1}
    holders = {name: stages for name, stages in stages_of.items() if len(stages) > 1}
    counted = {
        name: layout if name not in holders or holders[name][0] == stage else layout.uncounted()
        for name, layout in layouts.items()
    }
    parameters = cut_model(model, optimizer, counted, materializer, absent=absent)
    held = frozenset(name for name, stages in stages_of.items() if stage in stages)
    logical = {id(parameter): name for name, parameter in parameters.items()}
    plan = division.plan
    context = PieceContext(plan, SharedBuffers(buffers, stage))
    return CarvedModel(
        division=division,
        pieces=division.pieces(stage),
        parameters=parameters,
        held=held,
        logical_names={
            name: logical[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        },
        groups=groups,
        holders=holders,
        layouts=layouts,
        context=context,
        stand_ins=StandIns(context, device),
        buffers={name: one for one in buffers for name in one.names},
        tied=tied,
    )


def connect(model: nn.Module, carved: CarvedModel, stage: int) -> None:
    """Lets the model's own forward run the stage's pieces. In place, after everything else that changes its layers.

    Args:
        model: The user's model, carved.
        carved: What `carve` returned.
        stage: This rank's.
    """
    plan, division = carved.division.plan, carved.division
    for name in plan.gaps:
        if stage not in division.stand_in_stages(model, name):
            carved.stand_ins.put(model.get_submodule(name), name)
    if plan.sequence is not None:
        return
    for index, name in enumerate(plan.units):
        make_unit(model.get_submodule(name), index, carved.context)
    for name, complete_at in plan.carried.items():
        make_carried(model.get_submodule(name), name, complete_at, carved.context)


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns by the first name of each parameter that has several the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
