"""Memory and traffic estimate of Gemini: the plugin's own chunks and manager on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import count_communication, fake_collectives
from booster.interface import MemoryParts, MemoryRequest, RankMemory
from booster.interface.memory import MemoryInterval
from booster.plugins.sharding.memory import Moment, cast_bytes

from .chunk import Chunk, ChunkParam
from .chunk_init import describe_params, make_chunk, plan_model
from .chunk_manager import ChunkManager
from .collective_order import PassKind, RankRequest
from .config import GeminiSettings
from .placement import Placement
from .tiers import TierBlock, Transfer

# Note [Memory estimate]
# The set of gathered chunks depends on the placement, on the trace of the first step, and on the memory budget. The
# plugin's own manager and chunks determine it, on the meta device. They receive the calls of a model's hooks from the
# intervals of a forward and backward on fake tensors: first in a traced step, then in the measured one. Other ranks are
# fake and make the same requests; the offload tier only counts bytes.

_META = torch.device("meta")


@dataclass(slots=True)
class _FakeNegotiation:
    """Fake of `OrderNegotiation` without communication: the other ranks make the same requests."""

    group: dist.ProcessGroup | None
    max_gather_requests: int

    def exchange(self, request: RankRequest) -> list[RankRequest]:
        return [request]


class _CountedBlock:
    """Block without memory."""

    is_empty = False

    def __init__(self, tier: _CountingTier, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._tier: _CountingTier | None = tier

    def read_into(self, tensor: torch.Tensor) -> Transfer:
        """Do nothing."""
        return self

    def write_from(self, tensor: torch.Tensor) -> Transfer:
        """Do nothing."""
        return self

    def wait(self) -> None:
        """Do nothing."""

    def as_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a meta tensor."""
        return torch.empty(self.num_bytes // dtype.itemsize, dtype=dtype, device=_META)

    def free(self) -> None:
        """Remove the block from the count."""
        if self._tier is not None:
            self._tier.bytes_held -= self.num_bytes
            self._tier = None


class _CountingTier:
    """Offload tier that only counts bytes."""

    name: Literal["host"] = "host"

    def __init__(self) -> None:
        self.bytes_held = 0

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return a block."""
        self.bytes_held += num_bytes
        return _CountedBlock(self, num_bytes)

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Chunks:
    """Chunks of a model with their sizes.

    Attributes:
        manager: Chunk manager.
        params: Region of each parameter by name.
        settings: Sharding settings.
        masters: Bytes of this rank's master weights by chunk.
        states: Bytes of this rank's optimizer states by chunk.
        shapes: Shapes of this rank's shards by chunk.
    """

    manager: ChunkManager
    params: dict[str, ChunkParam]
    settings: GeminiSettings
    masters: dict[int, int] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


def gemini_memory(
    request: MemoryRequest,
    settings: GeminiSettings,
    placement: Placement,
    *,
    num_replicas: int,
    outputs_fp32: bool,
) -> RankMemory:
    """Return the memory and traffic of a rank.

    Args:
        request: Model and optimizer.
        settings: Sharding settings.
        placement: Placement policy.
        num_replicas: Number of replicas of this rank's shards.
        outputs_fp32: If True, the plugin casts the model's outputs to fp32.

    Raises:
        ConfigError: The placement's budget is too small.
    """
    is_cpu = settings.device.type == "cpu"
    model = _ModuleWalk(request.activations(settings.config.dtype, outputs_fp32=outputs_fp32).intervals, request.model)
    with fake_collectives():
        found = _make(request, settings, placement)
        model.run(found, is_cpu=is_cpu)
        _migrate(found.manager)
        with count_communication() as count:
            worst = model.run(found, is_cpu=is_cpu)
    return _memory(request, found, worst, sent=sum(count.sent.values()), num_replicas=num_replicas)


def _make(request: MemoryRequest, settings: GeminiSettings, placement: Placement) -> _Chunks:
    trained = {id(one) for one in request.trained}
    named, infos, module_of = describe_params(request.model, trained, settings.config.dtype)
    plan = plan_model(infos, module_of, settings, settings.num_shards)
    settings = replace(settings, device=_META)
    on_meta = [(name, nn.Parameter(torch.empty(0, device=_META), requires_grad=False)) for name, _ in named]
    chunks = [make_chunk(index, layout, on_meta, settings) for index, layout in enumerate(plan.chunks)]
    tier = _CountingTier()
    manager = ChunkManager(
        chunks,
        negotiation=_FakeNegotiation(settings.order_group, 2 + settings.config.max_prefetch),  # type: ignore[arg-type]
        device=_META,
        placement=placement,
        control_group=settings.control_group or settings.data_parallel_group,
        make_tier=lambda: tier,
        max_prefetch=settings.config.max_prefetch,
        reduces_asynchronously=settings.config.enable_async_reduce,
        other_bytes=lambda: 0,
    )
    found = _Chunks(manager, {param.name: param for chunk in chunks for param in chunk.params}, settings)
    for chunk in chunks:
        _note_updated(found, chunk, request)
    manager.state_bytes = lambda chunk: (
        found.masters[chunk.index] + found.states[chunk.index] if chunk.layout.trains else 0
    )
    manager.locations = manager.choose_locations()
    if manager.locations.weights or manager.locations.states:
        manager.needed_tier()
    for chunk in chunks:
        _fill(chunk, manager, settings)
    return found


def _note_updated(found: _Chunks, chunk: Chunk, request: MemoryRequest) -> None:
    """Record the master and state bytes of a chunk on the first rank, whose shard has no waste."""
    layout = chunk.layout
    dtype = found.settings.master_dtype(layout)
    found.masters[chunk.index] = layout.shard_numel * dtype.itemsize if dtype != layout.dtype else 0
    parts = layout.parts(0) if layout.trains else []
    owned = sum(part.span[1] - part.span[0] for part in parts)
    shapes = [place.shape for place in layout.regions] if layout.trains else []
    found.shapes[chunk.index] = [(part.span[1] - part.span[0],) for part in parts]
    found.states[chunk.index] = request.state_bytes(shapes, dtype, owned / max(1, layout.used_numel))


def _fill(chunk: Chunk, manager: ChunkManager, settings: GeminiSettings) -> None:
    """Allocate a chunk's shard, as `fill_chunk` does."""
    is_offloaded = chunk.index in manager.locations.weights
    for param in chunk.params:
        param.unbind()
    if chunk.index in manager.locations.kept_gathered or (settings.num_shards == 1 and not is_offloaded):
        chunk.keep_gathered(torch.empty(chunk.layout.numel, dtype=chunk.layout.dtype, device=_META))
    else:
        chunk.weights.allocate(manager.tier if is_offloaded else None)


def _migrate(manager: ChunkManager) -> None:
    """Move the shards to the placement's locations after the traced step."""
    locations = manager.choose_locations()
    if locations == manager.locations:
        return
    manager.locations, tier = locations, manager.needed_tier()
    for chunk in manager.chunks:
        chunk.migrate_weights(tier if chunk.index in locations.weights else None)


class _ModuleWalk:
    """Forward and backward as calls of a chunk manager.

    Args:
        intervals: Memory intervals of the step.
        model: Model of the step.
    """

    def __init__(self, intervals: Sequence[MemoryInterval], model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        self._intervals = intervals
        self._own = {
            name: [names[id(one)] for one in module.parameters(recurse=False)] for name, module in model.named_modules()
        }
        # Lookups need the weights in forward alone.
        self._looks_up = {
            name for name, one in model.named_modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))
        }

    def run(self, found: _Chunks, *, is_cpu: bool) -> Moment:
        """Return the point of peak memory; `held` counts shards, gathered weights and gradients.

        Args:
            found: Chunks of the model.
            is_cpu: If True, only tensors saved by autograd count as other memory.
        """
        manager = found.manager
        others = 0
        manager.other_bytes = lambda: others
        manager.begin_forward(trains=True)
        worst, held = Moment(0, 0), manager.bytes_in_memory
        for interval in self._intervals:
            self._notify(found, interval)
            if manager.phase is PassKind.FORWARD:
                others = interval.begin if is_cpu else interval.activations
                manager.note_other_bytes()
            if interval.event == "gradient" or interval.name == "" or self._own[interval.name]:  # others move nothing
                held = manager.bytes_in_memory
            worst = max(worst, Moment(interval.activations, held), key=lambda one: one.total)
        manager.end_backward()
        last = Moment(0, manager.bytes_in_memory)
        manager.reduction.reset()
        return max(worst, last, key=lambda one: one.total)

    def _notify(self, found: _Chunks, interval: MemoryInterval) -> None:
        manager = found.manager
        if interval.event == "gradient":
            param = found.params[interval.name]
            if param.chunk.layout.trains:
                param.parameter.grad = torch.empty(param.region.shape, dtype=param.chunk.layout.dtype, device=_META)
                manager.reduction.on_grad_ready(param)
            return
        own = [found.params[name] for name in self._own[interval.name]]
        if interval.event == "enter" and own:
            manager.need(own)
            for chunk, params in _by_chunk(own):
                chunk.pin(params)
        elif interval.event == "leave":
            for chunk, params in _by_chunk(own):
                chunk.unpin(params)
            if interval.name == "":
                manager.end_forward(trains=True)
                manager.phase = PassKind.BACKWARD
        elif interval.event == "backward" and interval.name not in self._looks_up:
            for param in own:
                manager.need_in_backward(param)


def _by_chunk(params: Sequence[ChunkParam]) -> Iterator[tuple[Chunk, list[ChunkParam]]]:
    for chunk in dict.fromkeys(param.chunk for param in params):
        yield chunk, [param for param in params if param.chunk is chunk]


def _memory(request: MemoryRequest, found: _Chunks, worst: Moment, *, sent: int, num_replicas: int) -> RankMemory:
    manager, settings = found.manager, found.settings
    shards = sum(chunk.bytes_in_memory for chunk in manager.chunks)
    sums = {chunk.index: chunk.grad_shard.num_bytes for chunk in manager.chunks if chunk.layout.trains}
    in_memory = sum(size for index, size in sums.items() if index not in manager.locations.weights)
    states = {index: found.masters[index] + size for index, size in found.states.items()}
    offloaded_states = sum(size for index, size in states.items() if index in manager.locations.states)
    kept = {"parameters": shards, "optimizer_states": sum(states.values()) - offloaded_states}
    buffers = cast_bytes(request.model.buffers(), settings.config.dtype)
    gathered = worst.held - shards
    shared = 2 * (num_replicas - 1) * sum(sums.values()) // num_replicas
    kept_weights = sum(chunk.weights.num_bytes for chunk in manager.chunks if chunk.is_kept_gathered)
    sent_after_step = (settings.num_shards - 1) * kept_weights  # by the all-gather of the updated weights
    return RankMemory(
        steady_state=MemoryParts(**kept, buffers=buffers),
        backward=MemoryParts(**kept, activations=worst.activations, buffers=buffers + gathered),
        step=MemoryParts(**kept, gradients=in_memory, activations=_step_bytes(request, found), buffers=buffers),
        sent=sent + shared + sent_after_step,
        offloaded=offloaded_states + (0 if manager.tier is None else manager.tier.bytes_held),
    )


def _step_bytes(request: MemoryRequest, found: _Chunks) -> int:
    by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
    rounded = 0
    for chunk in found.manager.chunks:
        if chunk.layout.trains:
            dtype = found.settings.master_dtype(chunk.layout)
            by_dtype.setdefault(dtype, []).extend(found.shapes[chunk.index])
            if dtype != chunk.grad_shard.dtype:  # gradients in the dtype of the update
                rounded += chunk.layout.shard_numel * dtype.itemsize
    return rounded + max((request.step_bytes(shapes, dtype) for dtype, shapes in by_dtype.items()), default=0)
