"""Memory and traffic estimate of FSDP2, by a simulation of the allocations of training steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from booster.comm import sum_dtype
from booster.errors import ConfigError
from booster.interface import MemoryParts, MemoryRequest, RankMemory
from booster.interface.memory import MemoryInterval
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.memory import Moment, cast_bytes

from .wrap import FSDPModelBuilder, WrapPlan

_META = torch.device("meta")


@dataclass(slots=True, eq=False)
class SimulatedParamGroup:
    """Sizes of a parameter group.

    Attributes:
        num_ranks: Size of the shard group.
        shapes: Unsharded shapes of the parameters, by name.
        trainable: Names of trainable parameters.
        dtype: Dtype of the shards.
        compute_dtype: Dtype of gathered weights and of their gradients.
        casts: Whether FSDP2 casts the weights when it gathers them.
        reduce_dtype: Dtype of the reduce-scatter.
        reshards: Argument `reshard_after_forward` of `fully_shard`, with its default resolved.
        is_root: Whether this is the root's group.
        update_dtype: Dtype that the optimizer updates the weights in.
        shard_numel: Elements of every rank's shards, with padding.
        trainable_numel: Elements of trainable parameters among them.
        gathered_bytes: Bytes of the gathered weights.
        post_forward_bytes: Bytes of weights that stay gathered between forward and backward, for an integer `reshards`.
        grad_dtype: Dtype of reduced gradients.
    """

    num_ranks: int
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    casts: bool
    reduce_dtype: torch.dtype
    reshards: bool | int
    is_root: bool
    update_dtype: torch.dtype
    shard_numel: int = field(init=False)
    trainable_numel: int = field(init=False)
    gathered_bytes: int = field(init=False)
    post_forward_bytes: int = field(init=False)
    grad_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shard_numel = sum(map(self.padded_numel, self.shapes))
        self.trainable_numel = sum(map(self.padded_numel, self.trainable))
        self.gathered_bytes = self.shard_numel * self.num_ranks * self.compute_dtype.itemsize
        self.post_forward_bytes = 0 if isinstance(self.reshards, bool) else self.gathered_bytes // self.reshards
        self.grad_dtype = self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32

    def padded_numel(self, name: str) -> int:
        """Elements of every rank's shard of a parameter, with padding."""
        rows, *rest = self.shapes[name]
        return -(-rows // self.num_ranks) * math.prod(rest)

    def gradient_bytes(self, name: str) -> int:
        """Bytes of a parameter's unsharded gradient."""
        return math.prod(self.shapes[name]) * self.compute_dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for the collectives of a forward and backward."""
        others = self.num_ranks - 1
        all_gather = others * self.shard_numel * self.compute_dtype.itemsize
        reduce_scatter = others * self.trainable_numel * self.reduce_dtype.itemsize
        if not self.reshards:
            return all_gather + reduce_scatter
        if self.reshards is True:
            return 2 * all_gather + reduce_scatter
        return all_gather + (self.reshards - 1) * self.gathered_bytes // self.reshards + reduce_scatter


class _Buffers:
    """Simulated buffers of collectives, allocated as by `booster.plugins.torch_fsdp.param_group.allocate`.

    Args:
        pools: If True, buffers are allocated from a pool.
    """

    def __init__(self, *, pools: bool) -> None:
        self._pool = BufferPool(_META) if pools else None
        self._num_bytes = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer; the pool reuses it once the tensor is dropped."""
        if self._pool is None:
            self._num_bytes += num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, device=_META)
        buffer = self._pool.acquire(num_bytes)
        view = buffer.view(num_bytes, torch.uint8)
        self._pool.release(buffer)
        return view

    def free(self, buffer: torch.Tensor | None) -> None:
        """Account for a tensor that the caller is about to drop."""
        if buffer is not None and self._pool is None:
            self._num_bytes -= buffer.nbytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, pooled ones included."""
        return self._num_bytes if self._pool is None else self._pool.bytes_held


class BufferSimulation:
    """Simulated memory of all parameter groups.

    A group's weights are gathered into one buffer and copied into the parameters' own memory, which lives until it is
    freed: after forward (except the root's, by default) and after the group's backward. During one group's backward the
    next one's buffer is filled already (prefetch). Unsharded gradients live until all of a group are ready. Then they
    are copied into one buffer, which lives until the next group's reduction has started. On the CPU buffers belong to
    the pool and are kept.

    Args:
        groups: Parameter groups by the name of their module.
        pools: If True, buffers are allocated from a pool.
    """

    def __init__(self, groups: dict[str, SimulatedParamGroup], *, pools: bool) -> None:
        self._groups = groups
        self._group_of = {name: group for group in groups.values() for name in group.shapes}
        self._pools = pools
        self._buffers = _Buffers(pools=pools)
        self._gathered: set[SimulatedParamGroup] = set()
        self._gathered_bytes = 0
        self._prefetched: dict[SimulatedParamGroup, torch.Tensor] = {}
        self._send_buffer: torch.Tensor | None = None
        self._partially_resharded: set[SimulatedParamGroup] = set()
        self._begin()

    def _begin(self) -> None:
        self._order: list[SimulatedParamGroup] = []
        self._missing = {group: set(group.trainable) for group in self._groups.values()}
        self._gradients: dict[str, int] = {}
        self._in_backward: set[SimulatedParamGroup] = set()
        self._is_done: set[SimulatedParamGroup] = set()
        self._peak_bytes = 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of unsharded gradients."""
        return sum(self._gradients.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is allocated."""
        between = sum(group.post_forward_bytes for group in self._partially_resharded)
        return self._gathered_bytes + between + self.gradient_bytes + self._buffers.num_bytes

    def process(self, interval: MemoryInterval) -> int:
        """Process an event; return the peak bytes while it is processed."""
        self._peak_bytes = self.num_bytes
        if interval.event == "gradient":
            self._on_gradient(interval.name)
        elif interval.name in self._groups:
            group = self._groups[interval.name]
            {"enter": self._gather, "leave": self._leave, "backward": self._begin_backward}[interval.event](group)
        return max(self._peak_bytes, self.num_bytes)

    def finish(self) -> int:
        """Process the end of a backward; return the peak bytes."""
        self._peak_bytes = self.num_bytes
        for group in self._groups.values():
            if group not in self._is_done:
                self._reduce(group)
        self._buffers.free(self._send_buffer)
        self._send_buffer = None
        most = max(self._peak_bytes, self.num_bytes)
        self._begin()
        return most

    def _update_peak(self, more: int = 0) -> None:
        self._peak_bytes = max(self._peak_bytes, self.num_bytes + more)

    def _leave(self, group: SimulatedParamGroup) -> None:
        if self._in_backward:  # recomputation in backward, for which the weights stay gathered
            return
        self._order.append(group)
        if group.reshards:
            self._free(group)
            if group.post_forward_bytes:
                self._partially_resharded.add(group)

    def _begin_backward(self, group: SimulatedParamGroup) -> None:
        if group in self._in_backward:
            return
        self._in_backward.add(group)
        self._gather(group)
        before = self._order.index(group) - 1 if group in self._order else -1
        if before >= 0:
            self._prefetch(self._order[before])

    def _prefetch(self, group: SimulatedParamGroup) -> None:
        if group in self._gathered or group in self._prefetched or group.num_ranks == 1:
            return
        self._prefetched[group] = self._buffers.allocate(group.gathered_bytes)
        self._update_peak(group.shard_numel * group.compute_dtype.itemsize if group.casts else 0)

    def _gather(self, group: SimulatedParamGroup) -> None:
        if group in self._gathered:
            return
        self._prefetch(group)
        self._gathered.add(group)
        self._gathered_bytes += group.gathered_bytes
        self._update_peak()
        self._buffers.free(self._prefetched.pop(group, None))
        self._partially_resharded.discard(group)

    def _free(self, group: SimulatedParamGroup) -> None:
        if group in self._gathered:
            self._gathered.remove(group)
            self._gathered_bytes -= group.gathered_bytes

    def _on_gradient(self, name: str) -> None:
        group = self._group_of.get(name)
        if group is None or name not in group.trainable:
            return
        self._gradients[name] = group.gradient_bytes(name)
        self._missing[group].discard(name)
        if not self._missing[group] and not group.is_root:
            self._reduce(group)

    def _reduce(self, group: SimulatedParamGroup) -> None:
        """Reduce a group's gradients, which are ready."""
        self._is_done.add(group)
        self._free(group)
        if not group.trainable:
            return
        self._gradients |= {name: group.gradient_bytes(name) for name in group.trainable}
        # On the CPU the previous reduction ends after this one has started.
        before, self._send_buffer = self._send_buffer, None
        if not self._pools or group.num_ranks == 1:
            self._buffers.free(before)
            before = None
        self._send_buffer = self._buffers.allocate(
            group.trainable_numel * group.num_ranks * group.reduce_dtype.itemsize
        )
        self._update_peak()
        for name in group.trainable:
            del self._gradients[name]
        self._buffers.free(before)
        del before
        output = group.trainable_numel * group.reduce_dtype.itemsize if group.num_ranks == 1 else 0
        given = group.trainable_numel * group.dtype.itemsize if group.dtype != group.grad_dtype else 0
        self._update_peak(output + given)


_NUM_STEPS = 3  # until the pool reaches its steady state


def fsdp_memory(request: MemoryRequest, builder: FSDPModelBuilder, *, is_cpu: bool, offloads: bool) -> RankMemory:
    """Return the memory and the bytes sent of a rank.

    Args:
        request: Model and optimizer to estimate.
        builder: Builder of the boosted model.
        is_cpu: If True, weights are gathered in host memory.
        offloads: If True, shards, gradients and states are in host memory next to an accelerator.

    Raises:
        ConfigError: The plugin has `ignored_modules`.
    """
    if builder.ignored_modules:
        raise ConfigError(
            "ignored_modules are modules of the model that is passed to boost(), but an estimate uses a copy of it:"
            " leave ignored_modules out of this plugin; their parameters are then sharded like the rest"
        )
    model = request.prepared_model()
    plans = builder._plans(model, names := builder._replicated_names(model))
    groups = dict(_units(request, model, plans, names, builder))
    replicated = [one for name, one in model.named_parameters() if name in names]
    shards = sum(group.shard_numel * group.dtype.itemsize for group in groups.values())
    sums = sum(group.trainable_numel * group.grad_dtype.itemsize for group in groups.values())
    num_replicas = builder.strategy.num_replicas
    masters, states = _updated_bytes(request, groups)
    formats = builder.precision_dtypes
    profile = request.activations(None if formats is None else formats.param_dtype, outputs_fp32=False)
    simulation = BufferSimulation(groups, pools=is_cpu)
    for _ in range(_NUM_STEPS):
        peak, gradient_bytes = _simulate(profile.intervals, simulation)
    offloaded = shards + sums + masters + states if offloads else 0
    parameters = cast_bytes(replicated, None) + (0 if offloads else shards)
    steady_state = {
        "parameters": parameters,
        "gradients": 0 if offloads else sums,
        "optimizer_states": 0 if offloads else masters + states,
    }
    buffers = cast_bytes(model.buffers(), None if formats is None else formats.buffer_dtype)
    pooled = simulation.num_bytes
    replicated_grads = sum(one.nbytes for one in replicated if one.requires_grad)
    return RankMemory(
        steady_state=MemoryParts(**steady_state, buffers=buffers + pooled),
        backward=MemoryParts(
            **(steady_state | {"gradients": steady_state["gradients"] + gradient_bytes + replicated_grads}),
            activations=peak.activations,
            buffers=buffers + peak.held - gradient_bytes,
        ),
        step=MemoryParts(
            **(steady_state | {"gradients": steady_state["gradients"] + replicated_grads}),
            activations=_step_bytes(request, groups),
            buffers=buffers + pooled,
        ),
        sent=sum(group.sent_bytes for group in groups.values()) + 2 * (num_replicas - 1) * sums // num_replicas,
        offloaded=offloaded,
    )


def _units(
    request: MemoryRequest,
    model: nn.Module,
    plans: Sequence[tuple[WrapPlan, list[nn.Module]]],
    replicated: set[str],
    builder: FSDPModelBuilder,
) -> Iterator[tuple[str, SimulatedParamGroup]]:
    trained_ids = {id(one) for one in request.trained}
    trained = {name for name, one in request.model.named_parameters() if id(one) in trained_ids}
    names = {id(one): name for name, one in model.named_parameters()}
    taken = set(replicated)
    for plan, _ in plans:
        own = {names[id(one)]: one for one in plan.module.parameters() if names[id(one)] not in taken}
        taken |= own.keys()
        if not own:
            continue
        is_root = plan.module is model
        reshards = plan.reshard_after_forward
        reshards = builder.strategy.reshard_after_forward if reshards is None else reshards
        policy = builder._policy(plan, model)
        dtype = next(iter(own.values())).dtype
        yield (
            plan.name,
            SimulatedParamGroup(
                num_ranks=builder.strategy.shard_size,
                shapes={name: tuple(one.shape) for name, one in own.items()},
                trainable=frozenset(name for name, one in own.items() if one.requires_grad and name in trained),
                dtype=dtype,
                compute_dtype=policy.param_dtype or dtype,
                casts=policy.param_dtype is not None,
                reduce_dtype=policy.reduce_dtype or policy.param_dtype or dtype,
                reshards=not is_root if reshards is None else reshards,
                is_root=is_root,
                update_dtype=sum_dtype(dtype) if request.keeps_masters else dtype,
            ),
        )


def _simulate(intervals: Sequence[MemoryInterval], simulation: BufferSimulation) -> tuple[Moment, int]:
    """Return the peak, and the bytes of unsharded gradients at it."""
    peak, gradients = Moment(0, 0), 0

    def compare(moment: Moment) -> None:
        nonlocal peak, gradients
        if moment.total > peak.total:
            peak, gradients = moment, min(simulation.gradient_bytes, moment.held)

    for interval in intervals:
        compare(Moment(interval.begin, simulation.process(interval)))
        compare(Moment(interval.activations, simulation.num_bytes))
    compare(Moment(0, simulation.finish()))
    return peak, gradients


def _updated_bytes(request: MemoryRequest, groups: dict[str, SimulatedParamGroup]) -> tuple[int, int]:
    """Return the bytes of master weights and states of rank 0, whose shards have no padding."""
    masters = states = 0
    for group in groups.values():
        dtype = group.update_dtype
        for name in group.trainable:
            shape = group.shapes[name]
            share = group.padded_numel(name) / max(1, math.prod(shape))
            states += request.state_bytes([shape], dtype, share)
            masters += group.padded_numel(name) * dtype.itemsize if dtype != group.dtype else 0
    return masters, states


def _step_bytes(request: MemoryRequest, groups: dict[str, SimulatedParamGroup]) -> int:
    by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
    rounded = 0
    for group in groups.values():
        dtype = group.update_dtype
        by_dtype.setdefault(dtype, []).extend((group.padded_numel(name),) for name in group.trainable)
        if dtype != group.grad_dtype:  # gradients cast to the dtype of the update
            rounded += group.trainable_numel * dtype.itemsize
    return rounded + max((request.step_bytes(shapes, dtype) for dtype, shapes in by_dtype.items()), default=0)
