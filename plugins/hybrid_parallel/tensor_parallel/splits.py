"""Which features of a dimension each tensor-parallel rank holds: numbers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from booster.errors import ConfigError
from booster.interface.parameter_layout import Box, LayoutPiece, ParameterLayout

__all__ = ["Block", "UnitRange", "local_sizes", "split_layout", "units_of_rank", "vocabulary_layout", "vocabulary_rows"]

# Note [Units and groups]
# A dimension that is split consists of one block, or of several behind each other (query, key and value of a fused
# projection; gate and up). A block consists of units that stay together on one rank: the features of a head, or single
# ones. With grouped-query attention several query heads read one key-value head: the block of queries has `num_units`
# query heads in `num_groups` groups, that of keys as many units as groups. If there are enough groups, ranks take whole
# groups, as evenly as goes. If there are fewer groups than ranks, they take query heads as evenly as goes, and each of
# them has the key-value heads that its own query heads read: some are on several ranks, primary on the first of these.


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Features that are split alike; see Note [Units and groups].

    Attributes:
        num_units: How many units there are.
        unit_size: Features of a unit.
        num_query_units: Units of the block whose groups decide which rank holds what; None: this block's own.
        num_groups: Groups of these; None: every unit is a group.
    """

    num_units: int
    unit_size: int = 1
    num_query_units: int | None = None
    num_groups: int | None = None

    @property
    def size(self) -> int:
        """Number of features."""
        return self.num_units * self.unit_size


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The units of a block that a rank holds.

    Attributes:
        start: First unit.
        stop: One past the last.
        num_foreign: How many of them, from the first on, another rank counts.
    """

    start: int
    stop: int
    num_foreign: int = 0


def units_of_rank(block: Block, num_ranks: int, rank: int) -> UnitRange:
    """Returns the units of a block that a rank holds.

    Raises:
        ConfigError: There are more ranks than units, or the rank's query heads don't share key-value heads evenly.
    """
    num_queries = block.num_query_units or block.num_units
    num_groups = block.num_groups or num_queries
    if num_queries < num_ranks:
        raise ConfigError(
            f"tp_size={num_ranks} divides {num_queries} heads or features, so that some ranks would have none: take a"
            f" tp_size of at most {num_queries}, or leave the module out of the plan"
        )
    per_group = num_queries // num_groups
    if num_groups >= num_ranks:
        start, stop = _share(num_groups, num_ranks, rank)
        scale = block.num_units // num_groups
        return UnitRange(start * scale, stop * scale)
    first, last = _share(num_queries, num_ranks, rank)
    if block.num_units == num_queries:
        return UnitRange(first, last)
    start, stop = first // per_group, (last - 1) // per_group + 1
    counts = {min(last, (one + 1) * per_group) - max(first, one * per_group) for one in range(start, stop)}
    if len(counts) > 1:
        raise ConfigError(
            f"tp_size={num_ranks} gives rank {rank} the query heads {first} to {last - 1} of {num_queries}, which share"
            f" {num_groups} key-value heads unevenly: take a tp_size of at most {num_groups}, or a multiple of it"
        )
    return UnitRange(start, stop, num_foreign=int(first % per_group > 0))


def local_sizes(blocks: Sequence[Block], num_ranks: int) -> list[int]:
    """Returns how many features each rank holds of blocks that lie behind each other."""
    ranges = [[(block, units_of_rank(block, num_ranks, rank)) for block in blocks] for rank in range(num_ranks)]
    return [sum((held.stop - held.start) * block.unit_size for block, held in of_rank) for of_rank in ranges]


def split_layout(shape: Sequence[int], dim: int, blocks: Sequence[Block], num_ranks: int, rank: int) -> ParameterLayout:
    """Returns a rank's part of a parameter of which one dimension is split.

    Args:
        shape: Of the logical tensor.
        dim: The dimension that is split.
        blocks: What it consists of; their sizes add up to its length.
        num_ranks: Ranks that share the parameter.
        rank: This one among them.
    """
    dim %= len(shape)
    if sum(block.size for block in blocks) != shape[dim]:
        raise ConfigError(
            f"the plan splits a dimension of {shape[dim]} features into blocks of {[block.size for block in blocks]},"
            " which don't add up: give the blocks that the model's forward takes it apart into"
        )
    pieces = []
    offset = position = 0
    for block in blocks:
        held = units_of_rank(block, num_ranks, rank)
        foreign = (held.start, held.start + held.num_foreign, False)
        own = (held.start + held.num_foreign, held.stop, True)
        for start, stop, is_primary in (foreign, own):
            length = (stop - start) * block.unit_size
            if length > 0:
                logical = (offset + start * block.unit_size, length)
                pieces.append(_piece(shape, dim, (position, length), logical, is_primary))
            position += length
        offset += block.size
    local_shape = (*shape[:dim], position, *shape[dim + 1 :])
    return ParameterLayout(logical_shape=tuple(shape), local_shape=local_shape, pieces=tuple(pieces))


def vocabulary_rows(size: int, multiple: int, num_ranks: int, rank: int) -> tuple[int, int, int]:
    """Returns first row, one past the last, and how many rows a rank has room for, of a vocabulary split in order.

    Args:
        size: Entries of the vocabulary.
        multiple: What all ranks' room together is a multiple of.
        num_ranks: Ranks that share it; each has as much room.
        rank: This one among them.
    """
    step = math.lcm(multiple, num_ranks)
    room = -(-size // step) * step // num_ranks
    start = min(rank * room, size)
    return start, min(start + room, size), room


def vocabulary_layout(shape: Sequence[int], multiple: int, num_ranks: int, rank: int) -> ParameterLayout:
    """Returns a rank's part of a parameter whose rows are the vocabulary, which is padded with rows of zeros."""
    start, stop, room = vocabulary_rows(shape[0], multiple, num_ranks, rank)
    rows = stop - start
    pieces = (_piece(shape, 0, (0, rows), (start, rows), True),) if rows > 0 else ()
    return ParameterLayout(logical_shape=tuple(shape), local_shape=(room, *shape[1:]), pieces=pieces)


def _share(count: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Returns which of so many things a rank takes; the first ranks take one more where they don't divide."""
    base, rest = divmod(count, num_ranks)
    start = rank * base + min(rank, rest)
    return start, start + base + (rank < rest)


def _piece(
    shape: Sequence[int], dim: int, local: tuple[int, int], logical: tuple[int, int], is_primary: bool
) -> LayoutPiece:
    whole: Box = tuple((0, size) for size in shape)
    return LayoutPiece(
        local=(*whole[:dim], local, *whole[dim + 1 :]),
        logical=(*whole[:dim], logical, *whole[dim + 1 :]),
        is_primary=is_primary,
    )
