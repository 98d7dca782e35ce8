"""Redistribution of row-sharded parameters to one owner each, and back, for updates that need full matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm import all_to_all_single, collective_device, group_rank, group_size

__all__ = ["Divided", "PieceExchange", "choose_owners", "row_span"]

_MAX_ROUTES = 32  # plans in the cache; needed where each step has gradients of other parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
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


def row_span(shape: Sequence[int], rank: int, num_ranks: int) -> tuple[int, int]:
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


def choose_owners(members: Sequence[Divided], num_ranks: int) -> list[int]:
    """Return the owner rank of every parameter.

    Longest processing time first: in order of size, each to the rank with the fewest bytes so far. No rank has more
    than 4/3 of the optimum (Graham 1969, Bounds on Multiprocessing Timing Anomalies, theorem 2).

    Args:
        members: Parameters, equal on all ranks.
        num_ranks: Size of the group that the rows are sharded over.
    """
    sizes = [member.numel * member.dtype.itemsize for member in members]
    owners, loads = [0] * len(members), [0] * num_ranks
    for index in sorted(range(len(members)), key=lambda index: -sizes[index]):
        owner = min(range(num_ranks), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """All-to-all plan for a subset of the parameters; all sizes are bytes.

    Attributes:
        members: Indices of the parameters, sorted by owner.
        to_owners: Bytes that this rank sends to each owner, 0 to itself.
        from_ranks: Bytes that this rank receives from each rank as the owner, 0 from itself.
        largest: Largest size between any two ranks.
    """

    members: tuple[int, ...]
    to_owners: tuple[int, ...]
    from_ranks: tuple[int, ...]
    largest: int


class PieceExchange:
    """Redistributes row-sharded parameters to their owners, and back.

    Each direction is one all-to-all of bytes, whatever the dtypes are. A rank sends its rows of all parameters that it
    does not own: with balanced owners (P-1)/P of 1/P of all bytes on P ranks, as in a reduce-scatter. Peak bytes of a
    rank: the bytes that it sends, and twice those that it receives.

    Args:
        members: Parameters, equal on all ranks; other arguments refer to them by index.
        owners: Owner rank of each parameter, as returned by `choose_owners`.
        group: Group that the rows are sharded over; None for the world group.
        device: Device of the unsharded tensors.
    """

    def __init__(
        self,
        members: Sequence[Divided],
        owners: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._members = tuple(members)
        self._owners = tuple(owners)
        self._group = group
        self._device = device
        self._rank, self._num_ranks = group_rank(group), group_size(group)
        if len(self._owners) != len(self._members) or not set(self._owners) <= set(range(self._num_ranks)):
            raise AssertionError(f"invalid owners {self._owners} of {len(members)} members on {self._num_ranks} ranks")
        self._routes: dict[tuple[tuple[int, ...], torch.dtype | None], _Route] = {}

    @property
    def owned(self) -> tuple[int, ...]:
        """Indices of the parameters that this rank owns."""
        return tuple(index for index, owner in enumerate(self._owners) if owner == self._rank)

    def to_owners(
        self,
        pieces: Mapping[int, torch.Tensor],
        *,
        indices: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[int, torch.Tensor]:
        """Return the unsharded tensors of the parameters that this rank owns, in newly allocated memory.

        Args:
            pieces: This rank's contiguous shards, by index; an empty shard may be omitted.
            indices: Parameters to redistribute, equal on all ranks; optional, defaults to all.
            dtype: Dtype of all shards; optional, defaults to each parameter's own.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        route = self._route(indices, dtype)
        mine = {index: self._bytes_of_piece(index, pieces, dtype) for index in route.members}
        wholes = {
            index: torch.empty(
                self._members[index].shape, dtype=dtype or self._members[index].dtype, device=self._device
            )
            for index in sorted(route.members)
            if self._owners[index] == self._rank
        }
        own, elsewhere = self._parts_of(wholes, route)
        for index, part in own.items():
            part.copy_(mine.pop(index))
        self._move(list(mine.values()), elsewhere, route.to_owners, route.from_ranks, route.largest)
        return wholes

    def from_owners(
        self,
        wholes: Mapping[int, torch.Tensor],
        pieces: Mapping[int, torch.Tensor],
        *,
        indices: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fill this rank's shards in place from the owners' unsharded tensors; the inverse of `to_owners`.

        Args:
            wholes: Contiguous unsharded tensors of the parameters that this rank owns, by index.
            pieces: This rank's contiguous shards, by index; an empty shard may be omitted.
            indices: Parameters to redistribute, equal on all ranks; optional, defaults to all.
            dtype: Dtype of all tensors; optional, defaults to each parameter's own.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        route = self._route(indices, dtype)
        mine = {index: self._bytes_of_piece(index, pieces, dtype) for index in route.members}
        own, elsewhere = self._parts_of(self._checked_wholes(wholes, route, dtype), route)
        for index, part in own.items():
            mine.pop(index).copy_(part)
        self._move(elsewhere, list(mine.values()), route.from_ranks, route.to_owners, route.largest)

    def _move(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        sizes_to: Sequence[int],
        sizes_from: Sequence[int],
        largest: int,
    ) -> None:
        """All-to-all of bytes, ordered by rank; `targets` are filled in place."""
        if largest == 0:
            return
        device = collective_device(self._group)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        payload = torch.cat([empty, *(source.to(device) for source in sources)])
        output = empty.new_empty(sum(sizes_from))
        all_to_all_single(
            output, payload, self._group, output_sizes=sizes_from, payload_sizes=sizes_to, largest_size=largest
        )
        for target, part in zip(targets, output.split([target.numel() for target in targets]), strict=True):
            target.copy_(part)

    def _route(self, indices: Iterable[int] | None, dtype: torch.dtype | None) -> _Route:
        chosen = tuple(range(len(self._members)) if indices is None else sorted(set(indices)))
        if (chosen, dtype) not in self._routes:
            if len(self._routes) == _MAX_ROUTES:
                self._routes.clear()
            self._routes[chosen, dtype] = self._plan(chosen, dtype)
        return self._routes[chosen, dtype]

    def _plan(self, chosen: Sequence[int], dtype: torch.dtype | None) -> _Route:
        sizes = [[0] * self._num_ranks for _ in range(self._num_ranks)]  # bytes by source rank and owner
        for index in chosen:
            owner, itemsize = self._owners[index], (dtype or self._members[index].dtype).itemsize
            for rank in range(self._num_ranks):
                start, stop = self._span(index, rank)
                sizes[rank][owner] += (stop - start) * itemsize if rank != owner else 0
        return _Route(
            members=tuple(sorted(chosen, key=lambda index: self._owners[index])),
            to_owners=tuple(sizes[self._rank]),
            from_ranks=tuple(row[self._rank] for row in sizes),
            largest=max(map(max, sizes)),
        )

    def _span(self, index: int, rank: int) -> tuple[int, int]:
        return row_span(self._members[index].shape, rank, self._num_ranks)

    def _parts_of(
        self, wholes: Mapping[int, torch.Tensor], route: _Route
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Return byte views of this rank's rows by index, and of the other ranks' rows ordered by rank."""
        parts = {
            (rank, index): _bytes(wholes[index].reshape(-1)[slice(*self._span(index, rank))])
            for rank in range(self._num_ranks)
            for index in route.members
            if self._owners[index] == self._rank
        }
        own = {index: part for (rank, index), part in parts.items() if rank == self._rank}
        return own, [part for (rank, _), part in parts.items() if rank != self._rank]

    def _bytes_of_piece(
        self, index: int, pieces: Mapping[int, torch.Tensor], dtype: torch.dtype | None
    ) -> torch.Tensor:
        member, (start, stop) = self._members[index], self._span(index, self._rank)
        expected = dtype or member.dtype
        piece = pieces.get(index)
        if piece is None and start == stop:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if piece is None or (piece.numel(), piece.dtype) != (stop - start, expected) or not piece.is_contiguous():
            found = None if piece is None else f"{piece.numel()} {piece.dtype} of stride {piece.stride()}"
            raise AssertionError(f"rank {self._rank} has {found} of {member}, not {stop - start} contiguous {expected}")
        return _bytes(piece)

    def _checked_wholes(
        self, wholes: Mapping[int, torch.Tensor], route: _Route, dtype: torch.dtype | None
    ) -> Mapping[int, torch.Tensor]:
        for index in route.members:
            member, whole = self._members[index], wholes.get(index)
            if self._owners[index] != self._rank:
                continue
            if whole is None or whole.dtype != (dtype or member.dtype) or tuple(whole.shape) != member.shape:
                found = None if whole is None else f"{whole.dtype} of shape {tuple(whole.shape)}"
                raise AssertionError(f"rank {self._rank} owns {member} and has {found}, not {dtype or member.dtype}")
        return wholes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
