"""Memory model of a rank: shards of its stage's layers, and activations of the microbatches in flight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from booster.interface import ActivationProfile, MemoryRequest, RankMemory
from booster.interface.memory import MemoryInterval
from booster.plugins.low_level_zero.memory import zero_memory

from .config import HybridConfig
from .mesh import HybridMesh
from .partition import ModelPartitioner
from .pipeline_parallel.schedules.communication import action_list
from .pipeline_parallel.schedules.schedule import ActionKind
from .pipeline_parallel.shard_params import shard_parameter
from .pipeline_parallel.stage_forward import ModelChunk, StagePartition
from .pipeline_parallel.stage_partition.balance import position_of_gap
from .tp_plan.plan import TensorParallelPlan

_MAX_TENSOR_RANKS = 8  # of one node: more would send activations over the network

# Cache of plans: estimates of one model differ in many settings that do not change its plan.
_plans: WeakKeyDictionary[nn.Module, dict[str, TensorParallelPlan]] = WeakKeyDictionary()


def hybrid_memory(
    request: MemoryRequest,
    arguments: HybridConfig,
    mesh: HybridMesh,
    partitioner: ModelPartitioner,
    *,
    offloads: bool,
) -> RankMemory:
    """Return the memory of training on the rank that needs the most.

    Args:
        request: The model and its optimizer.
        arguments: Arguments of the plugin.
        mesh: The device mesh.
        partitioner: Partitioner of models.
        offloads: If True, masters and states are in host memory.

    Raises:
        ConfigError: The model cannot be partitioned or measured.
    """
    plans = _plans.setdefault(request.model, {})
    plan = plans.get(arguments.layer_sharding_key) or partitioner.plan(request.model)
    plans[arguments.layer_sharding_key] = plan
    stage_partition = partitioner.stage_partition(request.model)
    pipeline = arguments.pipeline
    num_microbatches = 1 if pipeline is None else pipeline.count_for(request.batch_size)
    is_unsharded = partitioner.tp_group is None and partitioner.sp_group is None and arguments.checkpointing is None
    profile = request.activations(
        arguments.dtype,
        shard=None if is_unsharded else lambda model: partitioner.shard_layers(model, plan),
        sharding_key=None if is_unsharded else ("hybrid_parallel", arguments.layer_sharding_key),
        num_microbatches=num_microbatches,
    )
    local = copy.deepcopy(request.model)
    shard_specs = partitioner.shard_specs(request.model, plan)
    for name, parameter in local.named_parameters():
        shard_parameter(parameter, shard_specs[name][0])
    if stage_partition is None:
        return _memory(
            _LocalMemoryRequest(request, local, None, profile), arguments, mesh, profile.sent, offloads=offloads
        )
    holders = stage_partition.parameter_stages(request.model)
    found = []
    for stage in range(stage_partition.num_stages):
        held = {name for name, stages in holders.items() if stage in stages}
        activations = _StageActivations(stage, stage_partition, profile, num_microbatches)
        local_request = _LocalMemoryRequest(request, local, held, activations.profile(sorted(held)))
        found.append(_memory(local_request, arguments, mesh, activations.sent, offloads=offloads))
    largest = max(found, key=lambda one: one.peak.total)
    return replace(largest, sent=max(one.sent for one in found))


def hybrid_settings(num_ranks: int) -> list[dict[str, Any]]:
    """Return candidate arguments of the plugin: combinations of tp_size and pp_size, with ZeRO 1 over the rest."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    found: list[dict[str, Any]] = []
    for tp_size in (size for size in divisors if size <= _MAX_TENSOR_RANKS):
        for pp_size in (size for size in divisors if (num_ranks // tp_size) % size == 0 and tp_size * size > 1):
            settings: dict[str, Any] = {"tp_size": tp_size, "pp_size": pp_size, "zero_stage": 1, "precision": "bf16"}
            found.append(settings | ({"num_microbatches": 2 * pp_size} if pp_size > 1 else {}))
    return found


def _memory(
    request: _LocalMemoryRequest, arguments: HybridConfig, mesh: HybridMesh, sent: int, *, offloads: bool
) -> RankMemory:
    num_data_ranks = mesh.size("dp", "sp")
    is_sharded = arguments.zero_stage > 0
    memory = zero_memory(
        request,
        arguments.zero(),
        num_shards=num_data_ranks if is_sharded else 1,
        num_replicas=1 if is_sharded else num_data_ranks,
        offloads=offloads,
    )
    return replace(memory, sent=memory.sent + sent)


class _LocalMemoryRequest(MemoryRequest):
    """Memory request for a rank's part of the model, with known activations.

    Args:
        full: Request for the full model.
        local: The model with the rank's shards.
        held: Names of the parameters that the rank holds; optional, defaults to all.
        profile: Profile of the rank's activations.
    """

    def __init__(
        self, full: MemoryRequest, local: nn.Module, held: set[str] | None, profile: ActivationProfile
    ) -> None:
        self._full = full
        self._profile = profile
        self.precision = full.precision
        self.model = local if held is None else _HeldParameters(local, held)
        trained = {id(one) for one in full.trained}
        pairs = zip(full.model.named_parameters(), local.parameters(), strict=True)
        self.trained = [own for (name, one), own in pairs if id(one) in trained and (held is None or name in held)]

    @property
    def batch_size(self) -> int:
        return self._full.batch_size

    @property
    def is_fused(self) -> bool:
        return self._full.is_fused

    def prepared_model(self) -> nn.Module:
        return self._full.prepared_model()

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        return self._full.state_bytes(shapes, dtype, share)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        return self._full.step_bytes(shapes, dtype)

    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], None] | None = None,
        sharding_key: Hashable = None,
        num_microbatches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        return self._profile


class _HeldParameters(nn.Module):
    _full: Any
    _held: set[str]

    def __init__(self, model: nn.Module, held: set[str]) -> None:
        super().__init__()
        self.__dict__["_full"], self.__dict__["_held"] = model, held

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, one) for name, one in self._full.named_parameters(*args, **kwargs) if name in self._held)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._full.named_buffers(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _ModuleMemory:
    """Activation memory of a module, from the memory timeline of the full model.

    Attributes:
        kept: Bytes of activations that its forward saves for backward.
        transient: Additional bytes at the peak of its forward and backward, relative to the end of its forward.
        returned: Bytes of its output.
    """

    kept: int
    transient: int
    returned: int


class _StageActivations:
    """The activations of a stage over its schedule.

    The activations of one microbatch are measured for each model chunk on the full model, with its layers sharded over
    the tensor- and sequence-parallel ranks. A stage holds those of its chunks once per microbatch in flight, plus the
    transient memory of one running layer.

    Args:
        stage: Index of the stage.
        stage_partition: Partition of the model into stages.
        profile: Profile of one microbatch in the full model.
        num_microbatches: Number of microbatches of a step.
    """

    def __init__(
        self,
        stage: int,
        stage_partition: StagePartition,
        profile: ActivationProfile,
        num_microbatches: int,
    ) -> None:
        self._stage_partition = stage_partition
        self._profile = profile
        self._modules = _module_memory(profile.intervals, (*stage_partition.plan.layers, *stage_partition.plan.gaps))
        self._chunks = {chunk.position: chunk for chunk in stage_partition.chunks(stage)}
        self._chunk_bytes = {position: self._kept_and_transient(chunk) for position, chunk in self._chunks.items()}
        self._actions = action_list(
            stage_partition.schedule, stage, stage_partition.num_stages, num_microbatches, stage_partition.num_chunks
        )
        units = sum(chunk.stop - chunk.start for chunk in self._chunks.values())
        within = profile.sent * num_microbatches * units // max(1, len(stage_partition.plan.layers))
        self.sent = within + num_microbatches * self._sent_between()

    def profile(self, names: Sequence[str]) -> ActivationProfile:
        """Return the stage's activations, as a timeline in which all gradients exist at the peak."""
        live = peak = 0
        last = ActionKind.BACKWARD_WEIGHT if self._stage_partition.schedule.defers_weights else ActionKind.BACKWARD
        for action in self._actions:
            kept, transient = self._chunk_bytes[action.position]
            if action.action.kind is ActionKind.FORWARD:
                live += kept
            peak = max(peak, live + transient)
            if action.action.kind is last:
                live -= kept
        gradients = tuple(MemoryInterval("gradient", name, 0, 0) for name in names)
        timeline = (*gradients, MemoryInterval("enter", "", peak, peak))
        return replace(self._profile, peaks=((peak, self._profile.gradients),), kept=peak, intervals=timeline)

    def _kept_and_transient(self, chunk: ModelChunk) -> tuple[int, int]:
        """Return the bytes of a microbatch that a chunk keeps until its backward, and those in addition at the peak."""
        names = self._names_in(chunk)
        kept = sum(self._modules[name].kept for name in names)
        if not chunk.is_first:
            kept += self._boundary_bytes(chunk.start)
        transient = freed = 0
        if chunk.is_last:  # the loss, and operations outside of modules
            kept += max(0, self._profile.kept - sum(one.kept for one in self._modules.values()))
            transient = max(0, self._profile.worst_peak(0.0)[0] - self._profile.kept)
        for name in reversed(names):  # a module's backward runs after those of later modules freed their activations
            transient = max(transient, self._modules[name].transient - freed)
            freed += self._modules[name].kept
        return kept, transient

    def _names_in(self, chunk: ModelChunk) -> list[str]:
        plan, bounds = self._stage_partition.plan, self._stage_partition.bounds
        found = []
        for unit in range(chunk.start, chunk.stop + 1):
            at = [name for name, gap in plan.gaps.items() if gap == unit]
            found += [name for name in at if position_of_gap(unit, bounds) == chunk.position and name in self._modules]
            if unit < chunk.stop:
                found.append(plan.layers[unit])
        return found

    def _boundary_bytes(self, start: int) -> int:
        """Return the bytes sent to the model chunk that starts at a layer."""
        name = self._stage_partition.plan.layers[start - 1]
        return self._modules[name].returned if name in self._modules else 0

    def _sent_between(self) -> int:
        """Return the bytes of a microbatch's hidden states and gradients that are sent to other stages."""
        total = 0
        for position, chunk in self._chunks.items():
            if not chunk.is_last and position + 1 not in self._chunks:
                total += self._boundary_bytes(chunk.stop)
            if not chunk.is_first and position - 1 not in self._chunks:
                total += self._boundary_bytes(chunk.start)
        return total


def _module_memory(timeline: Sequence[MemoryInterval], names: Sequence[str]) -> dict[str, _ModuleMemory]:
    """Return the memory of modules, none of which contains another, from a memory timeline."""
    started: dict[str, int] = {}
    ended: dict[str, int] = {}
    kept: dict[str, int] = {}
    peak: dict[str, int] = {}
    returned: dict[str, int] = {}
    running: str | None = None
    is_backward = False
    requested = set(names)
    for interval in timeline:
        is_backward = is_backward or (interval.event == "leave" and interval.name == "")
        if interval.name in requested and interval.event != "gradient":
            is_leaving = interval.event == "leave" and not is_backward  # backward recomputes checkpointed modules
            if interval.event == "enter" and not is_backward:
                started[interval.name] = interval.begin
            elif is_leaving:
                ended[interval.name] = interval.begin
                returned[interval.name] = interval.returned
                kept[interval.name] = kept.get(interval.name, 0) + interval.begin - started[interval.name]
            running = None if is_leaving else interval.name
        if running is not None:
            peak[running] = max(peak.get(running, 0), interval.activations)
    return {
        name: _ModuleMemory(kept[name], max(0, peak.get(name, 0) - ended[name]), returned[name])
        for name in names
        if name in ended
    }
