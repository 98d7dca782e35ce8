"""Memory and traffic estimate of FSDP2, by a simulation of the allocations of training steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface import MemoryParts, MemoryQuestion, RankMemory
from booster.interface.rank_memory import Stretch
from booster.plugins.sharding.memory import LOW_PRECISION, Moment, cast_bytes
from booster.plugins.torch_fsdp.assembly import Assembly
from booster.plugins.torch_fsdp.followed_units import FollowedUnit, FollowedUnits
from booster.plugins.torch_fsdp.wrapping import UnitPlan

__all__ = ["fsdp_memory"]

_NUM_STEPS = 3  # until the pool reaches its steady state


def fsdp_memory(question: MemoryQuestion, assembly: Assembly, *, is_cpu: bool, offloads: bool) -> RankMemory:
    """Return the memory and the bytes sent of a rank.

    Args:
        question: Model and optimizer to estimate.
        assembly: Builder of the boosted model.
        is_cpu: If True, weights are gathered in host memory.
        offloads: If True, shards, gradients and states are in host memory next to an accelerator.

    Raises:
        ConfigError: The plugin has `ignored_modules`.
    """
    if assembly.ignored_modules:
        raise ConfigError(
            "ignored_modules are modules of the model that is passed to boost(), but an estimate uses a copy of it:"
            " leave ignored_modules out of this plugin; their parameters are then sharded like the rest"
        )
    model = question.prepared_model()
    trained = _names_of(question)
    plans = assembly._plans(model, names := assembly._whole_names(model))
    units = dict(_units(model, plans, names, trained, assembly))
    whole = [one for name, one in model.named_parameters() if name in names]
    shards = sum(unit.shard_numel * unit.dtype.itemsize for unit in units.values())
    sums = sum(unit.trained_numel * unit.sum_dtype.itemsize for unit in units.values())
    masters, states = _updated_bytes(question, units)
    formats = assembly.formats
    profile = question.activations(None if formats is None else formats.param_dtype, outputs_fp32=False)
    follower = FollowedUnits(units, pools=is_cpu)
    for _ in range(_NUM_STEPS):
        worst, held = _follow(profile.course, follower)
    away = shards + sums + masters + states if offloads else 0
    parameters = cast_bytes(whole, None) + (0 if offloads else shards)
    kept = {
        "parameters": parameters,
        "gradients": 0 if offloads else sums,
        "optimizer_states": 0 if offloads else masters + states,
    }
    buffers = cast_bytes(model.buffers(), None if formats is None else formats.buffer_dtype)
    pooled = follower.num_bytes
    of_whole = sum(one.nbytes for one in whole if one.requires_grad)
    return RankMemory(
        kept=MemoryParts(**kept, buffers=buffers + pooled),
        backward=MemoryParts(
            **(kept | {"gradients": kept["gradients"] + held + of_whole}),
            activations=worst.activations,
            buffers=buffers + worst.held - held,
        ),
        step=MemoryParts(
            **(kept | {"gradients": kept["gradients"] + of_whole}),
            activations=_step_bytes(question, units),
            buffers=buffers + pooled,
        ),
        sent=_sent_bytes(units, assembly.strategy.num_replicas, sums),
        elsewhere=away,
    )


def _names_of(question: MemoryQuestion) -> set[str]:
    trained = {id(one) for one in question.trained}
    return {name for name, one in question.model.named_parameters() if id(one) in trained}


def _units(
    model: nn.Module,
    plans: Sequence[tuple[UnitPlan, list[nn.Module]]],
    whole: set[str],
    trained: set[str],
    assembly: Assembly,
) -> Iterator[tuple[str, FollowedUnit]]:
    names = {id(one): name for name, one in model.named_parameters()}
    taken = set(whole)
    for plan, _ in plans:
        own = {names[id(one)]: one for one in plan.module.parameters() if names[id(one)] not in taken}
        taken |= own.keys()
        if not own:
            continue
        is_root = plan.module is model
        reshards = plan.reshard_after_forward
        reshards = assembly.strategy.reshard_after_forward if reshards is None else reshards
        policy = assembly._policy(plan, model)
        dtype = next(iter(own.values())).dtype
        yield (
            plan.name,
            FollowedUnit(
                num_ranks=assembly.strategy.shard_size,
                shapes={name: tuple(one.shape) for name, one in own.items()},
                trained=frozenset(name for name, one in own.items() if one.requires_grad and name in trained),
                dtype=dtype,
                compute_dtype=policy.param_dtype or dtype,
                casts=policy.param_dtype is not None,
                reduce_dtype=policy.reduce_dtype or policy.param_dtype or dtype,
                reshards=not is_root if reshards is None else reshards,
                is_root=is_root,
            ),
        )


def _follow(course: Sequence[Stretch], follower: FollowedUnits) -> tuple[Moment, int]:
    """Return the peak, and the bytes of unsharded gradients at it."""
    worst, gradients = Moment(0, 0), 0

    def compare(moment: Moment) -> None:
        nonlocal worst, gradients
        if moment.total > worst.total:
            worst, gradients = moment, min(follower.gradient_bytes, moment.held)

    for stretch in course:
        compare(Moment(stretch.begin, follower.tell(stretch)))
        compare(Moment(stretch.activations, follower.num_bytes))
    compare(Moment(0, follower.finish()))
    return worst, gradients


def _updated_bytes(question: MemoryQuestion, units: dict[str, FollowedUnit]) -> tuple[int, int]:
    """Return the bytes of master weights and states of rank 0, whose shards have no padding."""
    masters = states = 0
    for unit in units.values():
        dtype = _main_dtype(question, unit)
        for name in unit.trained:
            shape = unit.shapes[name]
            share = unit.piece_numel(name) / max(1, math.prod(shape))
            states += question.state_bytes([shape], dtype, share)
            masters += unit.piece_numel(name) * dtype.itemsize if dtype != unit.dtype else 0
    return masters, states


def _main_dtype(question: MemoryQuestion, unit: FollowedUnit) -> torch.dtype:
    return torch.float32 if question.keeps_masters and unit.dtype in LOW_PRECISION else unit.dtype


def _step_bytes(question: MemoryQuestion, units: dict[str, FollowedUnit]) -> int:
    by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
    rounded = 0
    for unit in units.values():
        dtype = _main_dtype(question, unit)
        by_dtype.setdefault(dtype, []).extend((unit.piece_numel(name),) for name in unit.trained)
        if dtype != unit.sum_dtype:  # gradients cast to the dtype of the update
            rounded += unit.trained_numel * dtype.itemsize
    return rounded + max((question.step_bytes(shapes, dtype) for dtype, shapes in by_dtype.items()), default=0)


def _sent_bytes(units: dict[str, FollowedUnit], num_replicas: int, sums: int) -> int:
    moved = sum(unit.bytes_of_gathering + unit.bytes_of_reduction for unit in units.values())
    return moved + 2 * (num_replicas - 1) * sums // num_replicas
