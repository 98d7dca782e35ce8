"""Stage plans: the modules between which a model may be split, and their assignment to the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import PipelineSchedule

from .tracing import containers_of

# Note [Layers and gaps]
# *Layers* are the modules after which a chunk may end, usually the layers of a transformer. They run in sequence, and a
# layer depends on earlier ones only through the output of the previous one. Any other module has a *gap*: the number of
# layers that run before it, 0 before the first and len(layers) after the last. Modules that contain layers have no gap.
# Their direct parameters are *shared*, on all stages, as are those of a module that runs in several gaps. Modules
# without parameters are on all stages, too, and are not listed.
# A *skip output* is the output of another module that is needed after later layers, and is sent from chunk to chunk.


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Possible splits of a model into chunks; see Note [Layers and gaps].

    Attributes:
        layers: Names of the layers, in order of execution.
        gaps: Gaps of the outermost modules with parameters and without layers; a module with two names has two entries.
        skip_outputs: Modules whose output is sent to later chunks, and the gap at which it is complete.
        source: Description of the plan's source.
        sequence: Names of modules, and functions, that replace the model's forward, each applied to the output of the
            previous one; optional, by default the forward runs.
        bounds: Bounds of the user's split: position p has the layers bounds[p] to bounds[p + 1] - 1; optional.
        overwrites_embeddings: Whether the forward changes the output of a module before the layers in place.
    """

    layers: tuple[str, ...]
    gaps: Mapping[str, int] = field(default_factory=dict)
    skip_outputs: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    sequence: tuple[str | Callable[..., Any], ...] | None = None
    bounds: tuple[int, ...] | None = None
    overwrites_embeddings: bool = False

    def __post_init__(self) -> None:
        places = self.places.keys()
        nested = [name for name in places if places & containers_of((name,))]
        outside = [name for name, gap in {**self.gaps, **self.skip_outputs}.items() if not 0 <= gap <= len(self.layers)]
        assert self.layers, "no layers"
        assert len(set(self.layers)) == len(self.layers), f"layers twice: {self.layers}"
        assert not nested, f"in another layer or gap module: {nested}"
        assert not outside, f"gaps outside of 0 to {len(self.layers)}: {outside}"

    @property
    def places(self) -> dict[str, int]:
        """Gap of each gap module, and the gap before each layer, by name."""
        return {**{name: index for index, name in enumerate(self.layers)}, **self.gaps}


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

    def position_of_gap(self, gap: int) -> int:
        """Return the position of the chunk that runs a gap: that of the next layer, or the last one."""
        last = len(self.bounds) - 2
        return next((position for position in range(last) if gap < self.bounds[position + 1]), last)

    def stages_of(self, module_name: str) -> frozenset[int]:
        """Return the stages that hold a module's direct parameters.

        Those of a module that contains layers are on all stages, as its forward may use them on any of them.
        """
        place = self._stage_of(module_name)
        return frozenset(range(self.num_stages)) if place is None else frozenset({place})

    def _stage_of(self, module_name: str) -> int | None:
        """Return the stage of the layer or gap module that contains a module, or None."""
        # A layer is on the stage of the gap before it.
        for name, gap in self.plan.places.items():
            if _is_within(module_name, name):
                return self.schedule.place(self.position_of_gap(gap), self.num_stages)[0]
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

    def parameter_stages(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the stages of each parameter, ascending, by its first name."""
        of_module = self.module_stages(model)
        holders: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), set()).update(of_module[id(module)])
        return {name: tuple(sorted(holders[id(parameter)])) for name, parameter in model.named_parameters()}

    def handovers(self, stacks: Iterable[Sequence[str]]) -> Iterator[tuple[str, str]]:
        """Yield the neighbors in a stack of layers that are in two chunks, with nothing of the plan in between."""
        if self.plan.sequence is not None:  # whose functions may run between them
            return
        neighbors = {pair for stack in stacks for pair in pairwise(stack)}
        for bound in self.bounds[1:-1]:
            pair = self.plan.layers[bound - 1], self.plan.layers[bound]
            if pair in neighbors:
                yield pair

    def layers_of(self, stage: int, names: Sequence[str]) -> list[list[str]]:
        """Return which of these modules are layers of a stage, or inside of them, per chunk."""
        found = []
        for chunk in self.chunks(stage):
            layers = self.plan.layers[chunk.start : chunk.stop]
            found.append([name for name in names if any(_is_within(name, layer) for layer in layers)])
        return [one for one in found if one]


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def listed(names: Sequence[str]) -> str:
    """Return names as text, abbreviated if there are more than six."""
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])


def parameters_below(module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a named module, with all their names in the full model."""
    found = module.get_submodule(name).named_parameters(remove_duplicate=False)
    return [(f"{name}.{key}" if name else key, parameter) for key, parameter in found]


def shared_parameter_names(model: nn.Module, plan: StagePlan) -> tuple[str, ...]:
    """Return the names of the parameters on every stage: those outside of layers and gap modules.

    A tied parameter is listed only under its names outside of layers and gap modules.
    """
    # Another name for a layer, or for a module around layers, leads to parameters that have their place already.
    placed = {id(module) for name in plan.places for module in model.get_submodule(name).modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) not in placed:
            names.extend(f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False))
    return tuple(names)
