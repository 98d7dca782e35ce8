"""Simulation of FSDP2's buffers in a forward and backward, in sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from booster.interface.rank_memory import Stretch
from booster.plugins.sharding.buffer_pool import BufferPool

__all__ = ["FollowedUnit", "FollowedUnits"]

_META = torch.device("meta")


@dataclass(slots=True, eq=False)
class FollowedUnit:
    """Sizes of a parameter group.

    Attributes:
        num_ranks: Size of the shard group.
        shapes: Unsharded shapes of the parameters, by name.
        trained: Names of trainable parameters.
        dtype: Dtype of the shards.
        compute_dtype: Dtype of gathered weights and of their gradients.
        casts: Whether FSDP2 casts the weights when it gathers them.
        reduce_dtype: Dtype of the reduce-scatter.
        reshards: Argument `reshard_after_forward` of `fully_shard`, with its default resolved.
        is_root: Whether this is the root's group.
        shard_numel: Elements of every rank's shards, with padding.
        trained_numel: Elements of trainable parameters among them.
        whole_bytes: Bytes of the gathered weights.
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
    shard_numel: int = field(init=False)
    trained_numel: int = field(init=False)
    whole_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shard_numel = sum(map(self.piece_numel, self.shapes))
        self.trained_numel = sum(map(self.piece_numel, self.trained))
        self.whole_bytes = self.shard_numel * self.num_ranks * self.compute_dtype.itemsize

    def piece_numel(self, name: str) -> int:
        """Elements of every rank's shard of a parameter, with padding."""
        rows, *rest = self.shapes[name]
        return -(-rows // self.num_ranks) * math.prod(rest)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of reduced gradients."""
        return self.reduce_dtype if self.reduce_dtype.itemsize >= 4 else torch.float32

    @property
    def post_forward_bytes(self) -> int:
        """Bytes of weights that stay gathered between forward and backward, for an integer `reshards`."""
        return 0 if isinstance(self.reshards, bool) else self.whole_bytes // self.reshards

    def gradient_bytes(self, name: str) -> int:
        """Bytes of a parameter's unsharded gradient."""
        return math.prod(self.shapes[name]) * self.compute_dtype.itemsize

    @property
    def bytes_of_gathering(self) -> int:
        """Bytes that this rank sends for all-gathers in a forward and backward."""
        shard = self.shard_numel * self.compute_dtype.itemsize
        forward = (self.num_ranks - 1) * shard
        if not self.reshards:
            return forward
        if self.reshards is True:
            return 2 * forward
        return forward + (self.reshards - 1) * self.whole_bytes // self.reshards

    @property
    def bytes_of_reduction(self) -> int:
        """Bytes that this rank sends for the reduce-scatter in a backward."""
        return (self.num_ranks - 1) * self.trained_numel * self.reduce_dtype.itemsize


class _Buffers:
    """Simulated buffers of collectives, allocated as by `booster.plugins.torch_fsdp.collectives.room`.

    Args:
        pools: If True, buffers are allocated from a pool.
    """

    def __init__(self, *, pools: bool) -> None:
        self._pool = BufferPool(_META) if pools else None
        self._num_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer; the pool reuses it once the tensor is dropped."""
        if self._pool is None:
            self._num_bytes += num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, device=_META)
        buffer = self._pool.take(num_bytes)
        view = buffer.view(num_bytes, torch.uint8)
        self._pool.give_back(buffer)
        return view

    def let_go(self, room: torch.Tensor | None) -> None:
        """Account for a tensor that the caller is about to drop."""
        if room is not None and self._pool is None:
            self._num_bytes -= room.nbytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, pooled ones included."""
        return self._num_bytes if self._pool is None else self._pool.bytes_held


class FollowedUnits:
    """Simulated memory of all parameter groups.

    A group's weights are gathered into one buffer and copied into the parameters' own memory, which lives until it is
    freed: after forward (except the root's, by default) and after the group's backward. During one group's backward the
    next one's buffer is filled already (prefetch). Unsharded gradients live until all of a group are ready. Then they
    are copied into one buffer, which lives until the next group's reduction has started. On the CPU buffers belong to
    the pool and are kept.

    Args:
        units: Parameter groups by the name of their module.
        pools: If True, buffers are allocated from a pool.
    """

    def __init__(self, units: dict[str, FollowedUnit], *, pools: bool) -> None:
        self._units = units
        self._unit_of = {name: unit for unit in units.values() for name in unit.shapes}
        self._pools = pools
        self._buffers = _Buffers(pools=pools)
        self._whole: set[FollowedUnit] = set()
        self._whole_bytes = 0
        self._ahead: dict[FollowedUnit, torch.Tensor] = {}
        self._payload: torch.Tensor | None = None
        self._between: set[FollowedUnit] = set()
        self._begin()

    def _begin(self) -> None:
        self._order: list[FollowedUnit] = []
        self._missing = {unit: set(unit.trained) for unit in self._units.values()}
        self._gradients: dict[str, int] = {}
        self._in_backward: set[FollowedUnit] = set()
        self._is_done: set[FollowedUnit] = set()
        self._most = 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of unsharded gradients."""
        return sum(self._gradients.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is allocated."""
        between = sum(unit.post_forward_bytes for unit in self._between)
        return self._whole_bytes + between + self.gradient_bytes + self._buffers.num_bytes

    def tell(self, stretch: Stretch) -> int:
        """Process an event; return the peak bytes while it is processed."""
        self._most = self.num_bytes
        if stretch.event == "gradient":
            self._receive(stretch.name)
        elif stretch.name in self._units:
            unit = self._units[stretch.name]
            {"enter": self._enter, "leave": self._leave, "backward": self._begin_backward}[stretch.event](unit)
        return max(self._most, self.num_bytes)

    def finish(self) -> int:
        """Process the end of a backward; return the peak bytes."""
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

    def _enter(self, unit: FollowedUnit) -> None:
        self._gather(unit)

    def _leave(self, unit: FollowedUnit) -> None:
        if self._in_backward:  # recomputation in backward, for which the weights stay gathered
            return
        self._order.append(unit)
        if unit.reshards:
            self._free(unit)
            if unit.post_forward_bytes:
                self._between.add(unit)

    def _begin_backward(self, unit: FollowedUnit) -> None:
        if unit in self._in_backward:
            return
        self._in_backward.add(unit)
        self._gather(unit)
        before = self._order.index(unit) - 1 if unit in self._order else -1
        if before >= 0:
            self._fetch(self._order[before])

    def _fetch(self, unit: FollowedUnit) -> None:
        if unit in self._whole or unit in self._ahead or unit.num_ranks == 1:
            return
        self._ahead[unit] = self._buffers.take(unit.whole_bytes)
        self._note(unit.shard_numel * unit.compute_dtype.itemsize if unit.casts else 0)

    def _gather(self, unit: FollowedUnit) -> None:
        if unit in self._whole:
            return
        self._fetch(unit)
        self._whole.add(unit)
        self._whole_bytes += unit.whole_bytes
        self._note()
        self._buffers.let_go(self._ahead.pop(unit, None))
        self._between.discard(unit)

    def _free(self, unit: FollowedUnit) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._whole_bytes -= unit.whole_bytes

    def _receive(self, name: str) -> None:
        unit = self._unit_of.get(name)
        if unit is None or name not in unit.trained:
            return
        self._gradients[name] = unit.gradient_bytes(name)
        self._missing[unit].discard(name)
        if not self._missing[unit] and not unit.is_root:
            self._reduce(unit)

    def _reduce(self, unit: FollowedUnit) -> None:
        """Reduce a group's gradients, which are ready."""
        self._is_done.add(unit)
        self._free(unit)
        if not unit.trained:
            return
        self._gradients |= {name: unit.gradient_bytes(name) for name in unit.trained}
        # On the CPU the previous reduction ends after this one has started.
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
