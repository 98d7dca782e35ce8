"""Redistribution of row-sharded parameters to one owner each, and back, for updates that need full matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from booster.comm import all_to_all_single, collective_device, group_rank, group_size
from booster.errors import ConfigError


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


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner rank of every parameter.

    Longest processing time first: in order of size, each to the rank with the fewest bytes so far. No rank has more
    than 4/3 of the optimum (Graham 1969, Bounds on Multiprocessing Timing Anomalies, theorem 2).

    Args:
        sizes: Bytes of the parameters, equal on all ranks.
        num_ranks: Size of the group that the rows are sharded over.
    """
    owners, loads = [0] * len(sizes), [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(num_ranks), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class ParamRedistribution:
    """Redistributes row-sharded parameters to their owners, and back.

    Each direction is one all-to-all of bytes, whatever the dtypes are. A rank sends its rows of all parameters that it
    does not own: with balanced owners (P-1)/P of 1/P of all bytes on P ranks, as in a reduce-scatter. Peak bytes of a
    rank: the bytes that it sends, and twice those that it receives.

    Args:
        shapes: Unsharded shapes of the parameters, equal on all ranks; other arguments refer to them by index.
        owners: Owner rank of each parameter, as returned by `assign_owners`.
        group: Group that the rows are sharded over; None for the world group.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], owners: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._shapes = tuple(shapes)
        self._owners = tuple(owners)
        self._group = group
        self._rank, self._num_ranks = group_rank(group), group_size(group)

    def to_owners(self, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the unsharded tensors of the parameters that this rank owns, in newly allocated memory.

        Args:
            shards: This rank's contiguous shards, possibly empty, of any of the parameters; which ones, and their
                dtypes, are equal on all ranks.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        full_tensors = {
            index: shard.new_empty(self._shapes[index], requires_grad=False)
            for index, shard in shards.items()
            if self._owners[index] == self._rank
        }
        self._exchange(full_tensors, shards, to_owners=True)
        return full_tensors

    def from_owners(self, full_tensors: Mapping[int, torch.Tensor], shards: Mapping[int, torch.Tensor]) -> None:
        """Fill this rank's shards in place from the owners' unsharded tensors; the inverse of `to_owners`.

        Args:
            full_tensors: Unsharded tensors of those of the parameters that this rank owns, in the shards' dtypes.
            shards: As in `to_owners`.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has all rows already.
        """
        self._exchange(full_tensors, shards, to_owners=False)

    def _exchange(
        self, full_tensors: Mapping[int, torch.Tensor], shards: Mapping[int, torch.Tensor], *, to_owners: bool
    ) -> None:
        num_ranks = self._num_ranks
        shard_parts, shard_sizes = [], [0] * num_ranks  # of this rank's shards, by owner
        owned_parts, owned_sizes = [], [0] * num_ranks  # of the parameters that this rank owns, by rank
        largest = [0] * num_ranks  # by owner, what it receives of the first other rank, which has the most rows
        for index in sorted(shards, key=lambda index: (self._owners[index], index)):
            owner, shard = self._owners[index], shards[index].detach()
            start, stop = row_range(self._shapes[index], int(owner == 0), num_ranks)
            largest[owner] += (stop - start) * shard.element_size()
            if owner == self._rank:
                start, stop = row_range(self._shapes[index], owner, num_ranks)
                own = full_tensors[index].detach().reshape(-1)[start:stop]
                target, source = (own, shard) if to_owners else (shard, own)
                target.view(-1).copy_(source.view(-1))
            else:
                shard_parts.append(_bytes(shard))
                shard_sizes[owner] += shard.nbytes
        for index, full in full_tensors.items():  # sizes that differ between sender and receiver would mix up bytes
            shape, dtype = torch.Size(self._shapes[index]), shards[index].dtype
            if (full.shape, full.dtype) != (shape, dtype):
                raise ConfigError(
                    f"the optimizer replaced the data of a parameter of shape {tuple(shape)} and {dtype} by"
                    f" {tuple(full.shape)} and {full.dtype}: update parameters in place"
                )
        for rank in (rank for rank in range(num_ranks) if rank != self._rank):
            for index in sorted(full_tensors):
                start, stop = row_range(self._shapes[index], rank, num_ranks)
                owned_parts.append(_bytes(full_tensors[index].reshape(-1)[start:stop]))
                owned_sizes[rank] += owned_parts[-1].numel()
        if max(largest) == 0:
            return
        sources, targets = (shard_parts, owned_parts) if to_owners else (owned_parts, shard_parts)
        sizes_to, sizes_from = (shard_sizes, owned_sizes) if to_owners else (owned_sizes, shard_sizes)
        device = collective_device(self._group)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        send_buffer = torch.cat([empty, *(source.to(device) for source in sources)])
        output = empty.new_empty(sum(sizes_from))
        all_to_all_single(
            output, send_buffer, self._group, output_sizes=sizes_from, payload_sizes=sizes_to, largest_size=max(largest)
        )
        for target, received in zip(targets, output.split([target.numel() for target in targets]), strict=True):
            target.copy_(received)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
