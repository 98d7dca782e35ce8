"""A model of which every rank holds only a part of every tensor, with values that each rank can tell by itself.

model = SlicedModel({"w": (300, 200)}, "spans", rank, world_size)
model.fill()  # what the logical tensors hold there
...save, clear, load...
model.check()  # raises where an element is another one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from booster.interface import ModelWrapper, TensorSlice

__all__ = ["LAYOUTS", "SlicedModel", "logical_values"]

Box = tuple[tuple[int, int], ...]
Part = tuple[str, Box, tuple[int, int]]

_CHUNK_ELEMENTS = 1 << 13  # small enough that malloc reuses the memory of the chunk before
_PERIOD = 1_000_003  # a prime: no size or offset of a tensor is a multiple of it
# Integers up to 256 are exact in every floating-point format of 16 bits; 0 is what cleared memory holds.
_VALUES = torch.randint(1, 257, (_PERIOD,), generator=torch.Generator().manual_seed(0)).float()

# "replicated": every rank holds everything. "spans": all tensors in one flat line that the ranks divide, as ZeRO does.
# "rows", "columns": boxes that divide one dimension. "tiles": boxes that divide both, the first one by half the ranks.
# "transposed": replicated, and column by column in memory.
LAYOUTS = ("replicated", "spans", "rows", "columns", "tiles", "transposed")


class SlicedModel(ModelWrapper):
    """This rank's part of a model of plain tensors.

    Args:
        shapes: Of the logical tensors, by name; names without dots.
        layout: One of LAYOUTS; boxes need two dimensions, and tensors with fewer are replicated then.
        rank: Whose part.
        world_size: Parts in all.
        held: Dtype in memory.
        stored: Dtype in a file; None: as held.
        device: Where the memory is.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        layout: str,
        rank: int,
        world_size: int,
        *,
        held: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(nn.Module(), is_primary=rank == 0)
        self._shapes = dict(shapes)
        self._stored = stored or held
        self._parts = [part for part in _parts(self._shapes, layout, rank, world_size) if part[2][0] < part[2][1]]
        self._memory = [_zeros(box, span, held, layout == "transposed").to(device) for _, box, span in self._parts]
        self._is_replicated = [_is_replicated(shape, layout) for shape in self._shapes.values()]
        self._rank = rank

    def tensor_slices(self) -> list[TensorSlice]:
        replicated = dict(zip(self._shapes, self._is_replicated, strict=True))
        return [
            TensorSlice(
                name=name,
                dtype=self._stored,
                global_shape=self._shapes[name],
                box=box,
                span=span,
                tensor=memory,
                primary=not replicated[name] or self._rank == 0,
            )
            for (name, box, span), memory in zip(self._parts, self._memory, strict=True)
        ]

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        return {}

    @property
    def num_bytes(self) -> int:
        """What this rank holds."""
        return sum(memory.nbytes for memory in self._memory)

    def fill(self) -> None:
        """Gives every element the value of its place in the logical tensor."""
        for part, expected in self._expected():
            part.copy_(expected)

    def clear(self) -> None:
        """Zeroes what this rank holds."""
        for memory in self._memory:
            memory.zero_()

    def check(self) -> None:
        """Raises an AssertionError where an element is not that of its place."""
        wrong = sum(int((part != expected).sum()) for part, expected in self._expected())
        assert wrong == 0, f"{wrong} elements of rank {self._rank} are not those of their place"

    def _expected(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields shards of this rank's memory, each with the values that belong there."""
        seeds = {name: index for index, name in enumerate(self._shapes)}
        for (name, box, span), memory in zip(self._parts, self._memory, strict=True):
            for start in range(span[0], span[1], _CHUNK_ELEMENTS):
                stop = min(start + _CHUNK_ELEMENTS, span[1])
                index = _logical_index(self._shapes[name], box, torch.arange(start, stop))
                values = logical_values(seeds[name], index).to(memory)
                yield from _regions(memory, start - span[0], values)


def logical_values(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Returns the elements at these places of the row-major logical tensor: random numbers from 1 to 256."""
    return _VALUES[(index + seed * 1009) % _PERIOD]


def _regions(memory: torch.Tensor, start: int, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if memory.is_contiguous():
        yield memory.view(-1)[start : start + len(values)], values
        return
    columns = memory.shape[1]
    while len(values):
        row, column = divmod(start, columns)
        length = min(len(values), columns - column)
        yield memory[row, column : column + length], values[:length]
        start, values = start + length, values[length:]


def _logical_index(shape: tuple[int, ...], box: Box, position: torch.Tensor) -> torch.Tensor:
    """Returns where elements of a box, counted in its own order, lie in the row-major tensor."""
    if all(part == (0, size) for part, size in zip(box, shape, strict=True)):
        return position
    index, stride = torch.zeros_like(position), 1
    for size, (offset, length) in zip(reversed(shape), reversed(box), strict=True):
        index += (position % length + offset) * stride
        position, stride = position // length, stride * size
    return index


def _zeros(box: Box, span: tuple[int, int], held: torch.dtype, is_transposed: bool) -> torch.Tensor:
    lengths = [length for _, length in box]
    if is_transposed and len(lengths) == 2:
        return torch.zeros(lengths[::-1], dtype=held).t()
    is_whole = span == (0, math.prod(lengths))
    return torch.zeros(lengths if is_whole else span[1] - span[0], dtype=held)


def _is_replicated(shape: tuple[int, ...], layout: str) -> bool:
    return layout in ("replicated", "transposed") or (layout != "spans" and len(shape) < 2)


def _parts(shapes: Mapping[str, tuple[int, ...]], layout: str, rank: int, world_size: int) -> Iterator[Part]:
    total, before = sum(math.prod(shape) for shape in shapes.values()), 0
    start, stop = rank * total // world_size, (rank + 1) * total // world_size
    for name, shape in shapes.items():
        numel = math.prod(shape)
        whole = tuple((0, size) for size in shape)
        if layout == "spans":
            yield name, whole, (min(max(0, start - before), numel), min(max(0, stop - before), numel))
        elif _is_replicated(shape, layout):
            yield name, whole, (0, numel)
        else:
            box = _box(shape, layout, rank, world_size)
            yield name, box, (0, math.prod(length for _, length in box))
        before += numel


def _box(shape: tuple[int, ...], layout: str, rank: int, world_size: int) -> Box:
    num_rows = {"rows": world_size, "columns": 1, "tiles": max(1, world_size // 2)}[layout]
    num_columns = world_size // num_rows
    rows = _share(shape[0], rank // num_columns, num_rows)
    columns = _share(shape[1], rank % num_columns, num_columns)
    return (rows, columns, *((0, size) for size in shape[2:]))


def _share(size: int, index: int, num_shares: int) -> tuple[int, int]:
    start, stop = index * size // num_shares, (index + 1) * size // num_shares
    return start, stop - start
