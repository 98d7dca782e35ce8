"""Memory and traffic estimate of FSDP2, by a simulation of the allocations of training steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface import MemoryParts, MemoryRequest, RankMemory
from booster.interface.rank_memory import MemoryInterval
from booster.plugins.sharding.memory import LOW_PRECISION, Moment, cast_bytes
from booster.plugins.torch_fsdp.assembly import FSDPModelBuilder
from booster.plugins.torch_fsdp.followed_units import BufferSimulation, SimulatedParamGroup
from booster.plugins.torch_fsdp.wrapping import WrapPlan

__all__ = ["fsdp_memory"]

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
    trained = _names_of(request)
    plans = builder._plans(model, names := builder._replicated_names(model))
    groups = dict(_units(model, plans, names, trained, builder))
    replicated = [one for name, one in model.named_parameters() if name in names]
    shards = sum(group.shard_numel * group.dtype.itemsize for group in groups.values())
    sums = sum(group.trainable_numel * group.grad_dtype.itemsize for group in groups.values())
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
        sent=_sent_bytes(groups, builder.strategy.num_replicas, sums),
        offloaded=offloaded,
    )


def _names_of(request: MemoryRequest) -> set[str]:
    trained = {id(one) for one in request.trained}
    return {name for name, one in request.model.named_parameters() if id(one) in trained}


def _units(
    model: nn.Module,
    plans: Sequence[tuple[WrapPlan, list[nn.Module]]],
    replicated: set[str],
    trained: set[str],
    builder: FSDPModelBuilder,
) -> Iterator[tuple[str, SimulatedParamGroup]]:
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
        dtype = _master_dtype(request, group)
        for name in group.trainable:
            shape = group.shapes[name]
            share = group.padded_numel(name) / max(1, math.prod(shape))
            states += request.state_bytes([shape], dtype, share)
            masters += group.padded_numel(name) * dtype.itemsize if dtype != group.dtype else 0
    return masters, states


def _master_dtype(request: MemoryRequest, group: SimulatedParamGroup) -> torch.dtype:
    return torch.float32 if request.keeps_masters and group.dtype in LOW_PRECISION else group.dtype


def _step_bytes(request: MemoryRequest, groups: dict[str, SimulatedParamGroup]) -> int:
    by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
    rounded = 0
    for group in groups.values():
        dtype = _master_dtype(request, group)
        by_dtype.setdefault(dtype, []).extend((group.padded_numel(name),) for name in group.trainable)
        if dtype != group.grad_dtype:  # gradients cast to the dtype of the update
            rounded += group.trainable_numel * dtype.itemsize
    return rounded + max((request.step_bytes(shapes, dtype) for dtype, shapes in by_dtype.items()), default=0)


def _sent_bytes(groups: dict[str, SimulatedParamGroup], num_replicas: int, sums: int) -> int:
    moved = sum(group.all_gather_bytes + group.reduce_scatter_bytes for group in groups.values())
    return moved + 2 * (num_replicas - 1) * sums // num_replicas
