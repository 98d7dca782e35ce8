"""What a rank holds at every moment of a step, found by following what FSDP2 does with units, without any memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface import MemoryParts, MemoryQuestion, RankMemory
from booster.interface.rank_memory import Stretch
from booster.plugins.sharding.buffer_pool import BufferPool
from booster.plugins.sharding.memory import LOW_PRECISION, Moment, cast_bytes
from booster.plugins.torch_fsdp.assembly import Assembly
from booster.plugins.torch_fsdp.wrapping import UnitPlan

__all__ = ["fsdp_memory"]

# Note [A unit's memory]
# A unit's weights are gathered into one buffer and copied out of it into the parameters' own memory, which is there
# until they are freed: after forward (not the root's, by default) and when backward is done with the unit. While
# backward is in one unit, the buffer of the one before it is filled already. Gradients, whole, are there until all of a
# unit's are, and are copied into one buffer, which is there until the next unit's reduction has begun. Buffers are the
# pool's where it has them (on the CPU), and stay with it.

_META = torch.device("meta")


@dataclass(slots=True, eq=False)
class _Unit:
    """A unit as far as memory is concerned.

    Attributes:
        num_ranks: That share it.
        shapes: By name those of its parameters.
        trained: Names of those that train.
        dtype: Format of the shards.
        compute_dtype: Of gathered weights and of their gradients.
        casts: They differ by FSDP2's own doing.
        reduce_dtype: In which gradients travel.
        reshards: As `fully_shard` takes it, once None is decided.
        is_root: It is the model's.
    """

    num_ranks: int
    shapes: dict[str, tuple[int, ...]]
    trained: frozenset[str]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    casts: bool
    reduce_dtype: torch.dtype
    reshards: bool | int
    is_root: bool

    def piece_numel(self, name: str) -> int:
        """Elements that every rank has of a parameter, with padding."""
        rows, *rest = self.shapes[name]
        return -(-rows // self.num_ranks) * math.prod(rest)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The format of the sums of gradients."""
        return self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32

    @property
    def shard_numel(self) -> int:
        """Elements that every rank has."""
        return sum(map(self.piece_numel, self.shapes))

    @property
    def trained_numel(self) -> int:
        """Those that train."""
        return sum(self.piece_numel(name) for name in self.trained)

    @property
    def whole_bytes(self) -> int:
        """Of gathered weights."""
        return self.shard_numel * self.num_ranks * self.compute_dtype.itemsize

    @property
    def post_forward_bytes(self) -> int:
        """What stays of gathered weights after forward."""
        return 0 if isinstance(self.reshards, bool) else self.whole_bytes // self.reshards

    def gradient_bytes(self, name: str) -> int:
        """Of a parameter's whole gradient."""
        return math.prod(self.shapes[name]) * self.compute_dtype.itemsize

    @property
    def bytes_of_gathering(self) -> int:
        """Sent by this rank in a forward and backward."""
        shard = self.shard_numel * self.compute_dtype.itemsize
        forward = (self.num_ranks - 1) * shard
        if not self.reshards:
            return forward
        if self.reshards is True:
            return 2 * forward
        return forward + (self.reshards - 1) * self.whole_bytes // self.reshards

    @property
    def bytes_of_reduction(self) -> int:
        """Sent by this rank in a backward."""
        return (self.num_ranks - 1) * self.trained_numel * self.reduce_dtype.itemsize


class _Buffers:
    """Room for collectives, as `booster.plugins.torch_fsdp.collectives.room` gives it.

    Args:
        pools: Whether a pool keeps it.
    """

    def __init__(self, *, pools: bool) -> None:
        self._pool = BufferPool(_META) if pools else None
        self._num_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns room, which is given back when nobody holds the tensor any more."""
        if self._pool is None:
            self._num_bytes += num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, device=_META)
        buffer = self._pool.take(num_bytes)
        view = buffer.view(num_bytes, torch.uint8)
        self._pool.give_back(buffer)
        return view

    def let_go(self, room: torch.Tensor | None) -> None:
        """Takes note of a tensor that its holder is about to drop."""
        if room is not None and self._pool is None:
            self._num_bytes -= room.nbytes

    @property
    def num_bytes(self) -> int:
        """Of all that there is."""
        return self._num_bytes if self._pool is None else self._pool.bytes_held


class _Units:
    """What is gathered and what waits to be reduced; see Note [A unit's memory].

    Args:
        units: By the name of their module.
        pools: Whether buffers are a pool's.
    """

    def __init__(self, units: dict[str, _Unit], *, pools: bool) -> None:
        self._units = units
        self._unit_of = {name: unit for unit in units.values() for name in unit.shapes}
        self._pools = pools
        self._buffers = _Buffers(pools=pools)
        self._whole: set[_Unit] = set()
        self._ahead: dict[_Unit, torch.Tensor] = {}
        self._payload: torch.Tensor | None = None
        self._between: set[_Unit] = set()
        self._begin()

    def _begin(self) -> None:
        self._order: list[_Unit] = []
        self._missing = {unit: set(unit.trained) for unit in self._units.values()}
        self._gradients: dict[str, int] = {}
        self._in_backward: set[_Unit] = set()
        self._is_done: set[_Unit] = set()
        self._most = 0

    @property
    def gradient_bytes(self) -> int:
        """Of whole gradients that are here."""
        return sum(self._gradients.values())

    @property
    def num_bytes(self) -> int:
        """Of all that is here now."""
        whole = sum(unit.whole_bytes for unit in self._whole)
        between = sum(unit.post_forward_bytes for unit in self._between)
        return whole + between + self.gradient_bytes + self._buffers.num_bytes

    def tell(self, stretch: Stretch) -> int:
        """Takes note of an event; returns the most bytes until all is done that follows from it."""
        self._most = self.num_bytes
        if stretch.event == "gradient":
            self._receive(stretch.name)
        elif stretch.name in self._units:
            unit = self._units[stretch.name]
            {"enter": self._enter, "leave": self._leave, "backward": self._begin_backward}[stretch.event](unit)
        return max(self._most, self.num_bytes)

    def finish(self) -> int:
        """Called at the end of a backward."""
        self._most = self.num_bytes
        for unit in self._units.values():
            if unit not in self._is_done:
                self._reduce(unit)
        self._buffers.let_go(self._payload)
        self._payload = None
        most = max(self._most, self.num_bytes)
        self._begin()
        return most

    def _note(self, more: int = 0) -> None:
        self._most = max(self._most, self.num_bytes + more)

    def _enter(self, unit: _Unit) -> None:
        self._gather(unit)

    def _leave(self, unit: _Unit) -> None:
        if unit in self._in_backward:  # a part of the forward that is computed again
            return
        self._order.append(unit)
        if unit.reshards:
            self._free(unit)
            if unit.post_forward_bytes:
                self._between.add(unit)

    def _begin_backward(self, unit: _Unit) -> None:
        if unit in self._in_backward:
            return
        self._in_backward.add(unit)
        self._gather(unit)
        before = self._order.index(unit) - 1 if unit in self._order else -1
        if before >= 0:
            self._fetch(self._order[before])

    def _fetch(self, unit: _Unit) -> None:
        """Starts to gather."""
        if unit in self._whole or unit in self._ahead or unit.num_ranks == 1:
            return
        self._ahead[unit] = self._buffers.take(unit.whole_bytes)
        self._note(unit.shard_numel * unit.compute_dtype.itemsize if unit.casts else 0)

    def _gather(self, unit: _Unit) -> None:
        if unit in self._whole:
            return
        self._fetch(unit)
        self._whole.add(unit)
        self._note()
        self._buffers.let_go(self._ahead.pop(unit, None))
        self._between.discard(unit)

    def _free(self, unit: _Unit) -> None:
        self._whole.discard(unit)

    def _receive(self, name: str) -> None:
        unit = self._unit_of.get(name)
        if unit is None or name not in unit.trained:
            return
        self._gradients[name] = unit.gradient_bytes(name)
        self._missing[unit].discard(name)
        if not self._missing[unit] and not unit.is_root:
            self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        """Does what follows when the unit's gradients are there."""
        self._is_done.add(unit)
        self._free(unit)
        if not unit.trained:
            return
        self._gradients |= {name: unit.gradient_bytes(name) for name in unit.trained}
        # On the CPU the reduction before this one ends when this one has begun.
        before, self._payload = self._payload, None
        if not self._pools or unit.num_ranks == 1:
            self._buffers.let_go(before)
            before = None
        self._payload = self._buffers.take(unit.trained_numel * unit.num_ranks * unit.reduce_dtype.itemsize)
        self._note()
        for name in unit.trained:
            del self._gradients[name]
        self._buffers.let_go(before)
        del before
        output = unit.trained_numel * unit.reduce_dtype.itemsize if unit.num_ranks == 1 else 0
        given = unit.trained_numel * unit.dtype.itemsize if unit.dtype != unit.sum_dtype else 0
        self._note(output + given)


def fsdp_memory(question: MemoryQuestion, assembly: Assembly, *, is_cpu: bool, offloads: bool) -> RankMemory:
    """Returns what a rank holds and sends.

    Args:
        question: The model and its optimizer.
        assembly: Makes units.
        is_cpu: They are gathered in the host's memory.
        offloads: Shards, gradients and states are there beside an accelerator.

    Raises:
        ConfigError: The plugin has modules of another model.
    """
    if assembly.ignored_modules:
        raise ConfigError(
            "ignored_modules are modules of the model that goes into boost(), and an estimate works with a copy of it:"
            " leave ignored_modules out of the plugin that is asked; what they hold is then divided like the rest"
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
    follower = _Units(units, pools=is_cpu)
    _follow(profile.course, follower)
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
) -> Iterator[tuple[str, _Unit]]:
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
            _Unit(
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


def _follow(course: Sequence[Stretch], follower: _Units) -> tuple[Moment, int]:
    """Returns the worst moment, and the bytes of whole gradients at it."""
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


def _updated_bytes(question: MemoryQuestion, units: dict[str, _Unit]) -> tuple[int, int]:
    """Returns the bytes of masters and states of the first rank, which has no padding."""
    masters = states = 0
    for unit in units.values():
        dtype = _main_dtype(question, unit)
        for name in unit.trained:
            shape = unit.shapes[name]
            share = unit.piece_numel(name) / max(1, math.prod(shape))
            states += question.state_bytes([shape], dtype, share)
            masters += unit.piece_numel(name) * dtype.itemsize if dtype != unit.dtype else 0
    return masters, states


def _main_dtype(question: MemoryQuestion, unit: _Unit) -> torch.dtype:
    return torch.float32 if question.keeps_masters and unit.dtype in LOW_PRECISION else unit.dtype


def _step_bytes(question: MemoryQuestion, units: dict[str, _Unit]) -> int:
    by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
    rounded = 0
    for unit in units.values():
        dtype = _main_dtype(question, unit)
        by_dtype.setdefault(dtype, []).extend((unit.piece_numel(name),) for name in unit.trained)
        if dtype != unit.sum_dtype:  # gradients in the format that is updated
            rounded += unit.trained_numel * dtype.itemsize
    return rounded + max((question.step_bytes(shapes, dtype) for dtype, shapes in by_dtype.items()), default=0)


def _sent_bytes(units: dict[str, _Unit], num_replicas: int, sums: int) -> int:
    moved = sum(unit.bytes_of_gathering + unit.bytes_of_reduction for unit in units.values())
    return moved + 2 * (num_replicas - 1) * sums // num_replicas
