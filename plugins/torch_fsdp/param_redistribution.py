"""Redistribution of row-sharded parameters to one owner each, and back, for updates that need full matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm import all_to_all_single, collective_device, group_rank, group_size

_MAX_PLANS = 32  # plans in the cache; needed where each step has gradients of other parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSharded:
    """A parameter that is sharded by rows over the ranks.

    Attributes:
        name: Name in the user's model.
        shape: Unsharded shape.
        dtype: Default dtype of the shards.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)


def row_range(shape: Sequence[int], rank: int, num_ranks: int) -> tuple[int, int]:
    """Return start and stop of a rank's flat range of a row-major parameter.

    Shards have equally many full rows, except that the last ranks may have fewer or none. A scalar counts as one row.

    Args:
        shape: Unsharded shape.
        rank: Rank in the group that the rows are sharded over.
        num_ranks: Size of that group.
    """
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    rows_each = -(-rows // num_ranks)
    return min(rank * rows_each, rows) * rest, min((rank + 1) * rows_each, rows) * rest


def assign_owners(params: Sequence[RowSharded], num_ranks: int) -> list[int]:
    """Return the owner rank of every parameter.

    Longest processing time first: in order of size, each to the rank with the fewest bytes so far. No rank has more
    than 4/3 of the optimum (Graham 1969, Bounds on Multiprocessing Timing Anomalies, theorem 2).

    Args:
        params: Parameters, equal on all ranks.
        num_ranks: Size of the group that the rows are sharded over.
    """
    sizes = [param.numel * param.dtype.itemsize for param in params]
    owners, loads = [0] * len(params), [0] * num_ranks
    for index in sorted(range(len(params)), key=lambda index: -sizes[index]):
        owner = min(range(num_ranks), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllToAllPlan:
    """All-to-all plan for a subset of the parameters; all sizes are bytes.

    Attributes:
        params: Indices of the parameters, sorted by owner.
        to_owners: Bytes that this rank sends to each owner, 0 to itself.
        from_ranks: Bytes that this rank receives from each rank as the owner, 0 from itself.
        max_bytes: Largest size between any two ranks.
    """

    params: tuple[int, ...]
    to_owners: tuple[int, ...]
    from_ranks: tuple[int, ...]
    max_bytes: int


class ParamRedistribution:
    """Redistributes row-sharded parameters to their owners, and back.

    Each direction is one all-to-all of bytes, whatever the dtypes are. A rank sends its rows of all parameters that it
    does not own: with balanced owners (P-1)/P of 1/P of all bytes on P ranks, as in a reduce-scatter. Peak bytes of a
    rank: the bytes that it sends, and twice those that it receives.

    Args:
        params: Parameters, equal on all ranks; other arguments refer to them by index.
        owners: Owner rank of each parameter, as returned by `assign_owners`.
        group: Group that the rows are sharded over; None for the world group.
        device: Device of the unsharded tensors.
    """

    def __init__(
        self,
        params: Sequence[RowSharded],
        owners: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._params = tuple(params)
        self._owners = tuple(owners)
        self._group = group
        self._device = device
        self._rank, self._num_ranks = group_rank(group), group_size(group)
        if len(self._owners) != len(self._params) or not set(self._owners) <= set(range(self._num_ranks)):
            raise AssertionError(f"invalid owners {self._owners} of {len(params)} members on {self._num_ranks} ranks")
        self._plans: dict[tuple[tuple[int, ...], torch.dtype | None], _AllToAllPlan] = {}

    def to_owners(
        self,
        shards: Mapping[int, torch.Tensor],
        *,
        indices: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[int, torch.Tensor]:
        """Return the unsharded tensors of the parameters that this rank owns, in newly allocated memory.

        Args:
            shards: This rank's contiguous shards, by index; an empty shard may be omitted.
            indices: Parameters to redistribute, equal on all ranks; optional, defaults to all.
            dtype: Dtype of all shards; optional, defaults to each parameter's own.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        plan = self._plan_of(indices, dtype)
        mine = {index: self._bytes_of_shard(index, shards, dtype) for index in plan.params}
        full_tensors = {
            index: torch.empty(self._params[index].shape, dtype=dtype or self._params[index].dtype, device=self._device)
            for index in sorted(plan.params)
            if self._owners[index] == self._rank
        }
        own, remote = self._rows_of(full_tensors, plan)
        for index, part in own.items():
            part.copy_(mine.pop(index))
        self._all_to_all(list(mine.values()), remote, plan.to_owners, plan.from_ranks, plan.max_bytes)
        return full_tensors

    def from_owners(
        self,
        full_tensors: Mapping[int, torch.Tensor],
        shards: Mapping[int, torch.Tensor],
        *,
        indices: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fill this rank's shards in place from the owners' unsharded tensors; the inverse of `to_owners`.

        Args:
            full_tensors: Contiguous unsharded tensors of the parameters that this rank owns, by index.
            shards: This rank's contiguous shards, by index; an empty shard may be omitted.
            indices: Parameters to redistribute, equal on all ranks; optional, defaults to all.
            dtype: Dtype of all tensors; optional, defaults to each parameter's own.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        plan = self._plan_of(indices, dtype)
        mine = {index: self._bytes_of_shard(index, shards, dtype) for index in plan.params}
        own, remote = self._rows_of(self._check_full_tensors(full_tensors, plan, dtype), plan)
        for index, part in own.items():
            mine.pop(index).copy_(part)
        self._all_to_all(remote, list(mine.values()), plan.from_ranks, plan.to_owners, plan.max_bytes)

    def _all_to_all(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        sizes_to: Sequence[int],
        sizes_from: Sequence[int],
        max_bytes: int,
    ) -> None:
        """All-to-all of bytes, ordered by rank; `targets` are filled in place."""
        if max_bytes == 0:
            return
        device = collective_device(self._group)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        send_buffer = torch.cat([empty, *(source.to(device) for source in sources)])
        output = empty.new_empty(sum(sizes_from))
        all_to_all_single(
            output, send_buffer, self._group, output_sizes=sizes_from, payload_sizes=sizes_to, largest_size=max_bytes
        )
        for target, received in zip(targets, output.split([target.numel() for target in targets]), strict=True):
            target.copy_(received)

    def _plan_of(self, indices: Iterable[int] | None, dtype: torch.dtype | None) -> _AllToAllPlan:
        chosen = tuple(range(len(self._params)) if indices is None else sorted(set(indices)))
        if (chosen, dtype) not in self._plans:
            if len(self._plans) == _MAX_PLANS:
                self._plans.clear()
            self._plans[chosen, dtype] = self._build_plan(chosen, dtype)
        return self._plans[chosen, dtype]

    def _build_plan(self, chosen: Sequence[int], dtype: torch.dtype | None) -> _AllToAllPlan:
        sizes = [[0] * self._num_ranks for _ in range(self._num_ranks)]  # bytes by source rank and owner
        for index in chosen:
            owner, itemsize = self._owners[index], (dtype or self._params[index].dtype).itemsize
            for rank in range(self._num_ranks):
                start, stop = self._row_range(index, rank)
                sizes[rank][owner] += (stop - start) * itemsize if rank != owner else 0
        return _AllToAllPlan(
            params=tuple(sorted(chosen, key=lambda index: self._owners[index])),
            to_owners=tuple(sizes[self._rank]),
            from_ranks=tuple(row[self._rank] for row in sizes),
            max_bytes=max(map(max, sizes)),
        )

    def _row_range(self, index: int, rank: int) -> tuple[int, int]:
        return row_range(self._params[index].shape, rank, self._num_ranks)

    def _rows_of(
        self, full_tensors: Mapping[int, torch.Tensor], plan: _AllToAllPlan
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Return byte views of this rank's rows by index, and of the other ranks' rows ordered by rank."""
        rows = {
            (rank, index): _bytes(full_tensors[index].reshape(-1)[slice(*self._row_range(index, rank))])
            for rank in range(self._num_ranks)
            for index in plan.params
            if self._owners[index] == self._rank
        }
        own = {index: part for (rank, index), part in rows.items() if rank == self._rank}
        return own, [part for (rank, _), part in rows.items() if rank != self._rank]

    def _bytes_of_shard(
        self, index: int, shards: Mapping[int, torch.Tensor], dtype: torch.dtype | None
    ) -> torch.Tensor:
        param, (start, stop) = self._params[index], self._row_range(index, self._rank)
        expected = dtype or param.dtype
        shard = shards.get(index)
        if shard is None and start == stop:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if shard is None or (shard.numel(), shard.dtype) != (stop - start, expected) or not shard.is_contiguous():
            found = None if shard is None else f"{shard.numel()} {shard.dtype} of stride {shard.stride()}"
            raise AssertionError(f"rank {self._rank} has {found} of {param}, not {stop - start} contiguous {expected}")
        return _bytes(shard)

    def _check_full_tensors(
        self, full_tensors: Mapping[int, torch.Tensor], plan: _AllToAllPlan, dtype: torch.dtype | None
    ) -> Mapping[int, torch.Tensor]:
        for index in plan.params:
            param, full_tensor = self._params[index], full_tensors.get(index)
            if self._owners[index] != self._rank:
                continue
            if (
                full_tensor is None
                or full_tensor.dtype != (dtype or param.dtype)
                or tuple(full_tensor.shape) != param.shape
            ):
                found = None if full_tensor is None else f"{full_tensor.dtype} of shape {tuple(full_tensor.shape)}"
                raise AssertionError(f"rank {self._rank} owns {param} and has {found}, not {dtype or param.dtype}")
        return full_tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
