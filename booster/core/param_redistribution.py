"""Redistribution of sharded parameters to one owner each, and back, for updates that need full matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from booster.comm import all_to_all_single, collective_device, group_rank, group_size, max_of_numbers
from booster.errors import ConfigError

from .shard_spec import Box


def assign_owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner rank of every parameter.

    Longest processing time first: in order of cost, each to the rank with the lowest sum so far. No rank has more than
    4/3 of the optimum (Graham 1969, Bounds on Multiprocessing Timing Anomalies, theorem 2).

    Args:
        costs: Costs of the parameters, such as their bytes, equal on all ranks.
        num_ranks: Size of the group that they are sharded over.
    """
    owners, loads = [0] * len(costs), [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(num_ranks), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


@dataclass(slots=True)
class _Sizes:
    """Bytes that travel in one direction.

    Attributes:
        of_shards: Bytes of this rank's shards of others' parameters, by owner.
        of_owned: Bytes of others' shards of this rank's parameters, by rank.
        largest: Most bytes between any two ranks, equal on all ranks.
    """

    of_shards: list[int]
    of_owned: list[int]
    largest: int = field(default=0)


class ParamRedistribution(ABC):
    """Redistributes sharded parameters to their owners, and back.

    Each direction is one all-to-all of bytes, whatever the dtypes are. A rank sends its shards of all parameters that
    it does not own: with balanced owners (P-1)/P of 1/P of all bytes on P ranks, as in a reduce-scatter. Peak bytes of
    a rank: the bytes that it sends, and twice those that it receives.

    Args:
        shapes: Unsharded shapes of the parameters, equal on all ranks; other arguments refer to them by index.
        owners: Owner rank of each parameter, as returned by `assign_owners`.
        group: Group that they are sharded over; None for the world group.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], owners: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._shapes = tuple(tuple(shape) for shape in shapes)
        self._owners = tuple(owners)
        self._group = group
        self._rank, self._num_ranks = group_rank(group), group_size(group)
        self._sizes: dict[tuple[bool, tuple[tuple[int, torch.dtype], ...]], _Sizes] = {}

    @abstractmethod
    def blocks_of(self, rank: int, index: int, *, to_owner: bool) -> Sequence[Box]:
        """Return the blocks of a parameter that a rank holds.

        Args:
            rank: Rank in the group.
            index: The parameter.
            to_owner: If True, without those that another rank sends to the owner.
        """

    def gather(
        self, blocks: Mapping[int, Sequence[torch.Tensor]], dtypes: Mapping[int, torch.dtype], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Return the unsharded tensors of the parameters that this rank owns, in newly allocated memory.

        Args:
            blocks: This rank's elements, for each of `blocks_of(..., to_owner=True)`.
            dtypes: The dtypes of the parameters that are gathered; which ones, and their dtypes, are equal on all
                ranks.
            device: Device of the results.

        Collective: every rank of the group must call it. One all-to-all, or none if every owner has everything already,
        and an all-reduce of one number where parameters are chosen for the first time.
        """
        full_tensors = {
            index: torch.empty(self._shapes[index], dtype=dtype, device=device)
            for index, dtype in dtypes.items()
            if self._owners[index] == self._rank
        }
        self._exchange(full_tensors, blocks, dtypes, to_owners=True)
        return full_tensors

    def scatter(
        self,
        full_tensors: Mapping[int, torch.Tensor],
        blocks: Mapping[int, Sequence[torch.Tensor]],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        """Fill this rank's blocks in place from the owners' unsharded tensors.

        Args:
            full_tensors: Unsharded tensors of those of the parameters that this rank owns.
            blocks: This rank's elements, for each of `blocks_of(..., to_owner=False)`.
            dtypes: As in `gather`.

        Collective, as `gather`.

        Raises:
            ConfigError: An unsharded tensor has another shape or dtype than the parameter.
        """
        for index, full in full_tensors.items():  # sizes that differ between sender and receiver would mix up bytes
            shape, dtype = torch.Size(self._shapes[index]), dtypes[index]
            if (full.shape, full.dtype) != (shape, dtype):
                raise ConfigError(
                    f"the optimizer replaced the data of a parameter of shape {tuple(shape)} and {dtype} by"
                    f" {tuple(full.shape)} and {full.dtype}: update parameters in place"
                )
        self._exchange(full_tensors, blocks, dtypes, to_owners=False)

    def _exchange(
        self,
        full_tensors: Mapping[int, torch.Tensor],
        blocks: Mapping[int, Sequence[torch.Tensor]],
        dtypes: Mapping[int, torch.dtype],
        *,
        to_owners: bool,
    ) -> None:
        shard_parts: list[torch.Tensor] = []
        for index in sorted(dtypes, key=lambda index: (self._owners[index], index)):
            if self._owners[index] != self._rank:
                shard_parts += (block.detach() for block in blocks.get(index, ()))
                continue
            boxes = self.blocks_of(self._rank, index, to_owner=to_owners)
            for box, block in zip(boxes, blocks.get(index, ()), strict=True):
                own, shard = full_tensors[index].detach()[_index(box)], block.detach()
                target, source = (own, shard) if to_owners else (shard, own)
                target.copy_(source.reshape(target.shape))
        owned_parts = [
            full_tensors[index].detach()[_index(box)]
            for rank, index in self._others_blocks(dtypes)
            for box in self.blocks_of(rank, index, to_owner=to_owners)
        ]
        sizes = self._sizes_of(dtypes, to_owners=to_owners)
        if sizes.largest == 0:
            return
        sources, targets = (shard_parts, owned_parts) if to_owners else (owned_parts, shard_parts)
        sizes_to, sizes_from = (sizes.of_shards, sizes.of_owned) if to_owners else (sizes.of_owned, sizes.of_shards)
        device = collective_device(self._group)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        send_buffer = torch.cat([empty, *(_bytes(source).to(device) for source in sources)])
        output = empty.new_empty(sum(sizes_from))
        all_to_all_single(
            output,
            send_buffer,
            self._group,
            output_sizes=sizes_from,
            payload_sizes=sizes_to,
            largest_size=sizes.largest,
        )
        for target, received in zip(targets, output.split([target.nbytes for target in targets]), strict=True):
            if target.is_contiguous():
                _bytes(target).copy_(received)
            else:  # received bytes may not be aligned for the dtype
                filled = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                _bytes(filled).copy_(received)
                target.copy_(filled)

    def _others_blocks(self, dtypes: Mapping[int, torch.dtype]) -> Iterator[tuple[int, int]]:
        """Yield the other ranks with the parameters that this rank owns, in the order of their messages."""
        owned = sorted(index for index in dtypes if self._owners[index] == self._rank)
        return ((rank, index) for rank in range(self._num_ranks) if rank != self._rank for index in owned)

    def _sizes_of(self, dtypes: Mapping[int, torch.dtype], *, to_owners: bool) -> _Sizes:
        key = to_owners, tuple(sorted(dtypes.items(), key=lambda item: item[0]))
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = _Sizes([0] * self._num_ranks, [0] * self._num_ranks)
            for index, dtype in dtypes.items():
                if self._owners[index] != self._rank:
                    boxes = self.blocks_of(self._rank, index, to_owner=to_owners)
                    sizes.of_shards[self._owners[index]] += sum(map(_numel, boxes)) * dtype.itemsize
            for rank, index in self._others_blocks(dtypes):
                boxes = self.blocks_of(rank, index, to_owner=to_owners)
                sizes.of_owned[rank] += sum(map(_numel, boxes)) * dtypes[index].itemsize
            sizes.largest = self._largest(sizes, dtypes)
            self._sizes[key] = sizes
        return sizes

    def _largest(self, sizes: _Sizes, dtypes: Mapping[int, torch.dtype]) -> int:
        """Return the most bytes between any two ranks, equal on all of them. Collective."""
        return max_of_numbers([max(*sizes.of_shards, *sizes.of_owned)], self._group)[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A single element may have any stride.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in box)


def _numel(box: Box) -> int:
    return math.prod(length for _, length in box)
