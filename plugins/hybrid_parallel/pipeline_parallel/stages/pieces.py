"""Which pieces of a model each stage holds, and with them which modules and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.balance import position_of_gap
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan

__all__ = ["Piece", "StageDivision"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Units that a stage runs one after the other, without anything that travels between them.

    Attributes:
        position: Its place in the model, from 0.
        chunk: Which one it is of its stage's.
        start: Its first unit.
        stop: One past its last.
        is_first: Nothing comes before.
        is_last: Nothing comes after; the model's outputs are its.
    """

    position: int
    chunk: int
    start: int
    stop: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class StageDivision:
    """A model's units divided among the stages of a pipeline.

    Attributes:
        plan: The model's units, and what is around them.
        bounds: Position p has the units from `bounds[p]` up to `bounds[p + 1]`.
        schedule: Which stage has which position.
        num_stages: Of the pipeline.
        num_chunks: Pieces of each stage.
    """

    plan: StagePlan
    bounds: tuple[int, ...]
    schedule: PipelineSchedule
    num_stages: int
    num_chunks: int

    def pieces(self, stage: int) -> list[Piece]:
        """Returns what a stage holds, chunk by chunk."""
        positions = [self.schedule.position(stage, chunk, self.num_stages) for chunk in range(self.num_chunks)]
        last = self.num_stages * self.num_chunks - 1
        return [
            Piece(
                position=position,
                chunk=chunk,
                start=self.bounds[position],
                stop=self.bounds[position + 1],
                is_first=position == 0,
                is_last=position == last,
            )
            for chunk, position in enumerate(positions)
        ]

    def neighbours(self) -> list[tuple[int, int]]:
        """Returns the pairs of stages between which something travels, in ascending order."""
        stages = [self.schedule.place(position, self.num_stages)[0] for position in range(len(self.bounds) - 1)]
        return sorted({(min(pair), max(pair)) for pair in pairwise(stages) if pair[0] != pair[1]})

    def stage_of_gap(self, gap: int) -> int:
        """Returns the stage that runs what comes before a unit, or behind the last one."""
        return self.schedule.place(position_of_gap(gap, self.bounds), self.num_stages)[0]

    def stages_of(self, module_name: str) -> frozenset[int]:
        """Returns the stages that hold the parameters that a module has itself.

        Those of a module that contains units are held by all stages, as nobody knows in which of them its own forward
        uses them.
        """
        place = self._place_of(module_name)
        return frozenset(range(self.num_stages)) if place is None else frozenset({place})

    def _place_of(self, module_name: str) -> int | None:
        """Returns the stage of the unit or the module of a gap that a module is in; None: it is in neither."""
        for index, unit in enumerate(self.plan.units):
            if _is_within(module_name, unit):
                return self.stage_of_gap(index)  # the gap before a unit is its piece's
        for name, gap in self.plan.gaps.items():
            if _is_within(module_name, name):
                return self.stage_of_gap(gap)
        return None

    def module_stages(self, model: nn.Module) -> dict[int, frozenset[int]]:
        """Returns by a module's `id` the stages that hold its own parameters; one with several places is in several.

        Further names of a module that has a place, such as an attribute that leads to a list of layers, say nothing.
        """
        everywhere = frozenset(range(self.num_stages))
        found: dict[int, frozenset[int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if (place := self._place_of(name)) is not None:
                found[id(module)] = found.get(id(module), frozenset()) | {place}
        return {id(module): found.get(id(module), everywhere) for module in model.modules()}

    def stand_in_stages(self, model: nn.Module, name: str) -> frozenset[int]:
        """Returns the stages that hold a module of a gap, under whichever of its names."""
        return self.module_stages(model)[id(model.get_submodule(name))]

    def parameter_stages(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Returns by parameter name, tied ones once, the stages that hold it, in ascending order."""
        of_module = self.module_stages(model)
        holders: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), set()).update(of_module[id(module)])
        return {name: tuple(sorted(holders[id(parameter)])) for name, parameter in model.named_parameters()}

    def units_of(self, stage: int, names: Sequence[str]) -> list[list[str]]:
        """Returns which of these modules are units of a stage, or within them, piece by piece."""
        found = []
        for piece in self.pieces(stage):
            units = self.plan.units[piece.start : piece.stop]
            found.append([name for name in names if any(_is_within(name, unit) for unit in units)])
        return [one for one in found if one]


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
