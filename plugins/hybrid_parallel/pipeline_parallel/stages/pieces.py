"""Assignment of model chunks to stages, with their modules and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.balance import position_of_gap
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan

__all__ = ["ModelChunk", "StagePartition"]


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Model chunk: consecutive layers that a stage runs without communication in between.

    Attributes:
        position: Position in the model, from 0.
        chunk: Index among the stage's chunks.
        start: Index of its first layer.
        stop: Index after its last layer.
        is_first: Whether it is the first chunk of the model.
        is_last: Whether it is the last chunk, which returns the model's outputs.
    """

    position: int
    chunk: int
    start: int
    stop: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Partition of a model's layers over the stages of a pipeline.

    Attributes:
        plan: Layers of the model, and the modules around them.
        bounds: Position p has the layers from `bounds[p]` up to `bounds[p + 1]`.
        schedule: Schedule, which assigns positions to stages.
        num_stages: Number of stages.
        num_chunks: Model chunks per stage.
    """

    plan: StagePlan
    bounds: tuple[int, ...]
    schedule: PipelineSchedule
    num_stages: int
    num_chunks: int

    def chunks(self, stage: int) -> list[ModelChunk]:
        """Return the chunks of a stage."""
        positions = [self.schedule.position(stage, chunk, self.num_stages) for chunk in range(self.num_chunks)]
        last = self.num_stages * self.num_chunks - 1
        return [
            ModelChunk(
                position=position,
                chunk=chunk,
                start=self.bounds[position],
                stop=self.bounds[position + 1],
                is_first=position == 0,
                is_last=position == last,
            )
            for chunk, position in enumerate(positions)
        ]

    def linked_stages(self) -> list[tuple[int, int]]:
        """Return the pairs of stages that communicate, ascending."""
        stages = [self.schedule.place(position, self.num_stages)[0] for position in range(len(self.bounds) - 1)]
        return sorted({(min(pair), max(pair)) for pair in pairwise(stages) if pair[0] != pair[1]})

    def stage_of_gap(self, gap: int) -> int:
        """Return the stage that runs the modules of a gap."""
        return self.schedule.place(position_of_gap(gap, self.bounds), self.num_stages)[0]

    def stages_of(self, module_name: str) -> frozenset[int]:
        """Return the stages that hold a module's direct parameters.

        Those of a module that contains layers are on all stages, as its forward may use them on any of them.
        """
        place = self._stage_of(module_name)
        return frozenset(range(self.num_stages)) if place is None else frozenset({place})

    def _stage_of(self, module_name: str) -> int | None:
        """Return the stage of the layer or gap module that contains a module, or None."""
        for index, unit in enumerate(self.plan.layers):
            if _is_within(module_name, unit):
                return self.stage_of_gap(index)  # the gap before a layer belongs to its chunk
        for name, gap in self.plan.gaps.items():
            if _is_within(module_name, name):
                return self.stage_of_gap(gap)
        return None

    def module_stages(self, model: nn.Module) -> dict[int, frozenset[int]]:
        """Return the stages that hold each module's direct parameters, by its `id`.

        Further names of a module that has a stage, such as an attribute that refers to a layer list, are ignored.
        """
        everywhere = frozenset(range(self.num_stages))
        found: dict[int, frozenset[int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if (place := self._stage_of(name)) is not None:
                found[id(module)] = found.get(id(module), frozenset()) | {place}
        return {id(module): found.get(id(module), everywhere) for module in model.modules()}

    def stages_of_gap_module(self, model: nn.Module, name: str) -> frozenset[int]:
        """Return the stages that hold a gap module, under any of its names."""
        return self.module_stages(model)[id(model.get_submodule(name))]

    def parameter_stages(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the stages of each parameter, ascending, by its first name."""
        of_module = self.module_stages(model)
        holders: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), set()).update(of_module[id(module)])
        return {name: tuple(sorted(holders[id(parameter)])) for name, parameter in model.named_parameters()}

    def layers_of(self, stage: int, names: Sequence[str]) -> list[list[str]]:
        """Return which of these modules are layers of a stage, or inside of them, per chunk."""
        found = []
        for chunk in self.chunks(stage):
            units = self.plan.layers[chunk.start : chunk.stop]
            found.append([name for name in names if any(_is_within(name, unit) for unit in units)])
        return [one for one in found if one]


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
