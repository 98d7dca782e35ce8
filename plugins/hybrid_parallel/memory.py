"""Memory model of a rank: shards of its stage's layers, and activations of the microbatches in flight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from booster.interface import ActivationProfile, MemoryQuestion, RankMemory
from booster.interface.rank_memory import Stretch
from booster.plugins.hybrid_parallel.cutting import cut_parameter
from booster.plugins.hybrid_parallel.mesh import HybridMesh
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.communication import program
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.balance import position_of_gap
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import Piece, StageDivision
from booster.plugins.hybrid_parallel.placement import ModelSplit
from booster.plugins.hybrid_parallel.plans.plan import TensorParallelPlan
from booster.plugins.hybrid_parallel.settings import HybridArguments
from booster.plugins.low_level_zero.memory import zero_memory

__all__ = ["hybrid_memory", "hybrid_settings"]

_MOST_TENSOR_RANKS = 8  # of one node: more would send activations over the network

# Cache of plans: estimates of one model differ in many settings that do not change its plan.
_plans: WeakKeyDictionary[nn.Module, dict[str, TensorParallelPlan]] = WeakKeyDictionary()


def hybrid_memory(
    question: MemoryQuestion, arguments: HybridArguments, mesh: HybridMesh, split: ModelSplit, *, offloads: bool
) -> RankMemory:
    """Return the memory of training on the rank that needs the most.

    Args:
        question: The model and its optimizer.
        arguments: Arguments of the plugin.
        mesh: The device mesh.
        split: Partitioner of models.
        offloads: If True, masters and states are in host memory.

    Raises:
        ConfigError: The model cannot be partitioned or measured.
    """
    plans = _plans.setdefault(question.model, {})
    plan = plans.get(arguments.division_of_layers) or split.plan(question.model)
    plans[arguments.division_of_layers] = plan
    division = split.division(question.model)
    pipeline = arguments.pipeline
    num_micro_batches = 1 if pipeline is None else pipeline.count_for(question.batch_size)
    is_whole = split.tensor_ranks is None and split.sequence_ranks is None and arguments.checkpointing is None
    profile = question.activations(
        arguments.dtype,
        divide=None if is_whole else lambda model: split.divide_layers(model, plan),
        divided_as=None if is_whole else ("hybrid_parallel", arguments.division_of_layers),
        num_micro_batches=num_micro_batches,
    )
    local = copy.deepcopy(question.model)
    layouts = split.layouts(question.model, plan)
    for name, parameter in local.named_parameters():
        cut_parameter(parameter, layouts[name][0])
    if division is None:
        return _memory(_Part(question, local, None, profile), arguments, mesh, profile.sent, offloads=offloads)
    holders = division.parameter_stages(question.model)
    found = []
    for stage in range(division.num_stages):
        held = {name for name, stages in holders.items() if stage in stages}
        way = _Stage(stage, division, profile, num_micro_batches)
        part = _Part(question, local, held, way.profile(sorted(held)))
        found.append(_memory(part, arguments, mesh, way.sent, offloads=offloads))
    most = max(found, key=lambda one: one.peak.total)
    return replace(most, sent=max(one.sent for one in found))


def hybrid_settings(num_ranks: int) -> list[dict[str, Any]]:
    """Return candidate arguments of the plugin: combinations of tp_size and pp_size, with ZeRO 1 over the rest."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    found: list[dict[str, Any]] = []
    for tp_size in (size for size in divisors if size <= _MOST_TENSOR_RANKS):
        for pp_size in (size for size in divisors if (num_ranks // tp_size) % size == 0 and tp_size * size > 1):
            settings: dict[str, Any] = {"tp_size": tp_size, "pp_size": pp_size, "zero_stage": 1, "precision": "bf16"}
            found.append(settings | ({"num_microbatches": 2 * pp_size} if pp_size > 1 else {}))
    return found


def _memory(part: _Part, arguments: HybridArguments, mesh: HybridMesh, sent: int, *, offloads: bool) -> RankMemory:
    num_data_ranks = mesh.size("dp", "sp")
    is_sharded = arguments.zero_stage > 0
    memory = zero_memory(
        part,
        arguments.zero_arguments(),
        max_bucket_numel=arguments.max_bucket_numel,
        num_shards=num_data_ranks if is_sharded else 1,
        num_replicas=1 if is_sharded else num_data_ranks,
        offloads=offloads,
    )
    return replace(memory, sent=memory.sent + sent)


class _Part(MemoryQuestion):
    """Memory request for a rank's part of the model, with known activations.

    Args:
        whole: Request for the full model.
        local: The model with the rank's shards.
        held: Names of the parameters that the rank holds, or None for all.
        profile: Profile of the rank's activations.
    """

    def __init__(
        self, whole: MemoryQuestion, local: nn.Module, held: set[str] | None, profile: ActivationProfile
    ) -> None:
        self._whole = whole
        self._profile = profile
        self.precision = whole.precision
        self.model = local if held is None else _HeldParameters(local, held)
        trained = {id(one) for one in whole.trained}
        pairs = zip(whole.model.named_parameters(), local.parameters(), strict=True)
        self.trained = [own for (name, one), own in pairs if id(one) in trained and (held is None or name in held)]

    @property
    def batch_size(self) -> int:
        return self._whole.batch_size

    @property
    def is_fused(self) -> bool:
        return self._whole.is_fused

    def prepared_model(self) -> nn.Module:
        return self._whole.prepared_model()

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        return self._whole.state_bytes(shapes, dtype, share)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        return self._whole.step_bytes(shapes, dtype)

    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        divide: Callable[[nn.Module], None] | None = None,
        divided_as: Hashable = None,
        num_micro_batches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        return self._profile


class _HeldParameters(nn.Module):
    _whole: Any
    _held: set[str]

    def __init__(self, model: nn.Module, held: set[str]) -> None:
        super().__init__()
        self.__dict__["_whole"], self.__dict__["_held"] = model, held

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, one) for name, one in self._whole.named_parameters(*args, **kwargs) if name in self._held)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole.named_buffers(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Module:
    """Activation memory of a module, from the memory timeline of the full model.

    Attributes:
        kept: Bytes of activations that its forward saves for backward.
        passing: Additional bytes at the peak of its forward and backward, relative to the end of its forward.
        returned: Bytes of its output.
    """

    kept: int
    passing: int
    returned: int


class _Stage:
    """The activations of a stage over its schedule.

    The activations of one microbatch are measured for each model chunk on the full model, with its layers sharded over
    the tensor- and sequence-parallel ranks. A stage holds those of its chunks once per microbatch in flight, plus the
    transient memory of one running layer.

    Args:
        stage: Index of the stage.
        division: Partition of the model into stages.
        profile: Profile of one microbatch in the full model.
        num_micro_batches: Number of microbatches of a step.
    """

    def __init__(
        self,
        stage: int,
        division: StageDivision,
        profile: ActivationProfile,
        num_micro_batches: int,
    ) -> None:
        self._division = division
        self._profile = profile
        self._modules = _modules(profile.course, (*division.plan.units, *division.plan.gaps))
        self._pieces = {piece.position: piece for piece in division.pieces(stage)}
        self._kept = {position: self._kept_by(piece) for position, piece in self._pieces.items()}
        self._passing = {position: self._passing_of(piece) for position, piece in self._pieces.items()}
        self._steps = program(division.schedule, stage, division.num_stages, num_micro_batches, division.num_chunks)
        units = sum(piece.stop - piece.start for piece in self._pieces.values())
        within = profile.sent * num_micro_batches * units // max(1, len(division.plan.units))
        self.sent = within + num_micro_batches * self._sent_between()

    def profile(self, names: Sequence[str]) -> ActivationProfile:
        """Return the stage's activations, as a timeline in which all gradients exist at the peak."""
        live = worst = 0
        last = Kind.WEIGHT if self._division.schedule.defers_weights else Kind.BACKWARD
        for step in self._steps:
            if step.work.kind is Kind.FORWARD:
                live += self._kept[step.position]
            worst = max(worst, live + self._passing[step.position])
            if step.work.kind is last:
                live -= self._kept[step.position]
        arrived = tuple(Stretch("gradient", name, 0, 0) for name in names)
        course = (*arrived, Stretch("enter", "", worst, worst))
        return replace(self._profile, moments=((worst, self._profile.gradients),), kept=worst, course=course)

    def _kept_by(self, piece: Piece) -> int:
        kept = sum(self._modules[name].kept for name in self._names_in(piece))
        if piece.is_last:  # the loss, and operations outside of modules
            kept += max(0, self._profile.kept - sum(one.kept for one in self._modules.values()))
        return kept + (0 if piece.is_first else self._boundary(piece.start))

    def _passing_of(self, piece: Piece) -> int:
        names = self._names_in(piece)
        passing = behind = 0
        if piece.is_last:
            passing = max(0, self._profile.worst_moment(0.0)[0] - self._profile.kept)
        for name in reversed(names):  # a module's backward runs after those of later modules freed their activations
            passing = max(passing, self._modules[name].passing - behind)
            behind += self._modules[name].kept
        return passing

    def _names_in(self, piece: Piece) -> list[str]:
        plan, bounds = self._division.plan, self._division.bounds
        found = []
        for unit in range(piece.start, piece.stop + 1):
            at = [name for name, gap in plan.gaps.items() if gap == unit]
            found += [name for name in at if position_of_gap(unit, bounds) == piece.position and name in self._modules]
            if unit < piece.stop:
                found.append(plan.units[unit])
        return found

    def _boundary(self, start: int) -> int:
        """Return the bytes sent to the model chunk that starts at a layer."""
        name = self._division.plan.units[start - 1]
        return self._modules[name].returned if name in self._modules else 0

    def _sent_between(self) -> int:
        """Return the bytes of a microbatch's hidden states and gradients that are sent to other stages."""
        total = 0
        for position, piece in self._pieces.items():
            if not piece.is_last and position + 1 not in self._pieces:
                total += self._boundary(piece.stop)
            if not piece.is_first and position - 1 not in self._pieces:
                total += self._boundary(piece.start)
        return total


def _modules(course: Sequence[Stretch], names: Sequence[str]) -> dict[str, _Module]:
    """Return the memory of modules, none of which contains another, from a memory timeline."""
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    kept: dict[str, int] = {}
    highest: dict[str, int] = {}
    returned: dict[str, int] = {}
    running: str | None = None
    is_backward = False
    wanted = set(names)
    for stretch in course:
        is_backward = is_backward or (stretch.event == "leave" and stretch.name == "")
        if stretch.name in wanted and stretch.event != "gradient":
            is_leaving = stretch.event == "leave" and not is_backward  # backward recomputes checkpointed modules
            if stretch.event == "enter" and not is_backward:
                begun[stretch.name] = stretch.begin
            elif is_leaving:
                ended[stretch.name] = stretch.begin
                returned[stretch.name] = stretch.returned
                kept[stretch.name] = kept.get(stretch.name, 0) + stretch.begin - begun[stretch.name]
            running = None if is_leaving else stretch.name
        if running is not None:
            highest[running] = max(highest.get(running, 0), stretch.activations)
    return {
        name: _Module(kept[name], max(0, highest.get(name, 0) - ended[name]), returned[name])
        for name in names
        if name in ended
    }
