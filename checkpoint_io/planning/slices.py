"""Table of a save plan, the slice table that ranks exchange, and the contiguous runs of a slice."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
import torch

from booster.errors import CheckpointError
from booster.interface import TensorSlice, TensorSpec

Box = tuple[tuple[int, int], ...]  # per dimension the offset and the length, in elements


_integers = functools.partial(np.array, dtype=np.int64)


# Note [Runs of a box]: let `k` be the last dimension that the box does not fill. The product of the box's lengths from
# `k` on is the length of one contiguous run; the product of the lengths before `k` is the number of runs. Consecutive
# runs are never adjacent, because the box omits elements of dimension `k` between them: so runs are maximal.


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Batch of runs of a slice in slice order, as int64 columns in bytes.

    Attributes:
        logical: Offset of each run in the row-major logical tensor.
        local: Offset of each run in the slice's memory; 0 is the first element of the span.
        length: Length of each run.
    """

    logical: np.ndarray
    local: np.ndarray
    length: np.ndarray


@functools.lru_cache(maxsize=4096)  # a checkpoint has few shapes, and a load asks for each tensor's several times
def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers the full tensor."""
    return tuple((0, size) for size in shape)


def run_length(shape: Sequence[int], box: Box) -> int:
    """Return the run length of the box in elements; see Note [Runs of a box]."""
    partial = len(box) - 1
    while partial > 0 and box[partial][1] == shape[partial]:
        partial -= 1
    return math.prod(length for _, length in box[max(partial, 0) :])


Index = TypeVar("Index", int, np.ndarray)


def run_start(shape: Sequence[int], box: Box, element: Index) -> Index:
    """Map flat indices within the box to flat indices within the logical tensor."""
    start, stride = element * 0, 1
    for size, (offset, length) in zip(reversed(shape), reversed(box), strict=True):
        element, index = divmod(element, length)
        start += (offset + index) * stride
        stride *= size
    return start


def byte_runs(
    shape: Sequence[int], box: Box, span: tuple[int, int], itemsize: int, *, max_runs: int = 65536
) -> Iterator[RunBlock]:
    """Yield the maximal runs of a slice in slice order.

    Args:
        shape: Shape of the logical tensor.
        box: Offset and length per dimension.
        span: Flat range (start, stop) within the row-major flattening of the box.
        itemsize: Bytes per element.
        max_runs: Maximum runs per yielded block; bounds memory.
    """
    start, stop = span
    if start == stop:
        return
    length = run_length(shape, box)
    first_run, end = start // length, (stop - 1) // length + 1
    if end - first_run == 1:  # fast path: the usual case, often for 100,000 slices
        logical = run_start(shape, box, start) * itemsize
        yield RunBlock(*np.array([[logical], [0], [(stop - start) * itemsize]], dtype=np.int64))
        return
    for first in range(first_run, end, max_runs):
        runs = np.arange(first, min(first + max_runs, end), dtype=np.int64)
        begin = np.maximum(runs * length, start)
        size = np.minimum((runs + 1) * length, stop) - begin
        yield RunBlock(
            logical=run_start(shape, box, begin) * itemsize, local=(begin - start) * itemsize, length=size * itemsize
        )


def elements_before(shape: Sequence[int], box: Box, position: int) -> int:
    """Return how many elements of the box lie before a flat index of the logical tensor."""
    num_before, stride = 0, math.prod(length for _, length in box)
    rest, below = position, math.prod(shape)
    if position >= below:
        return stride
    for size, (offset, length) in zip(shape, box, strict=True):
        stride, below = stride // max(length, 1), below // size
        index, rest = divmod(rest, below)
        num_before += min(max(index - offset, 0), length) * stride
        if not offset <= index < offset + length:
            break
    return num_before


def overlapping_runs(
    shape: Sequence[int], box: Box, span: tuple[int, int], other_box: Box, other_span: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the maximal runs that two slices of a tensor share, in order, in elements.

    Returns:
        Offset of each run from the first element of `span`, its offset from the first of `other_span`, and its length.
    """
    first, last = run_start(shape, box, span[0]), run_start(shape, box, span[1] - 1)
    other_first = max(other_span[0], elements_before(shape, other_box, first))
    other_last = min(other_span[1], elements_before(shape, other_box, last + 1))
    if other_first >= other_last:
        return _integers([]), _integers([]), _integers([])
    runs, others = _all_runs(shape, box, span), _all_runs(shape, other_box, (other_first, other_last))
    # Every shared run begins where a run of one of the two begins.
    starts = np.union1d(runs.logical, others.logical)
    run = np.searchsorted(runs.logical, starts, side="right") - 1
    other = np.searchsorted(others.logical, starts, side="right") - 1
    starts, run, other = (column[(run >= 0) & (other >= 0)] for column in (starts, run, other))
    ends = np.minimum((runs.logical + runs.length)[run], (others.logical + others.length)[other])
    starts, ends, run, other = (column[ends > starts] for column in (starts, ends, run, other))
    in_other = starts - others.logical[other] + others.local[other] + (other_first - other_span[0])
    return starts - runs.logical[run] + runs.local[run], in_other, ends - starts


def _all_runs(shape: Sequence[int], box: Box, span: tuple[int, int]) -> RunBlock:
    return next(byte_runs(shape, box, span, 1, max_runs=span[1] - span[0]))


_unset = functools.partial(np.zeros, 0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTable:
    """Table of a plan: slices of ranks, then shards without duplicates, then ranges to write. See Note [Plan table].

    Attributes:
        tensor: Tensor index.
        box: Box index.
        start: First element of the span within the box.
        stop: One past the last element of the span.
        spec: Index of dtype and shape.
        table: Slice table that the row is from.
        slice_index: Index of the slice within the table of its rank.
        is_primary: Whether the rank's copy is the primary one.
        is_shared: Whether all replicas are bitwise equal.
        shard: Index of the shard that the row is of.
        replicas: Index of the set of ranks that hold replicas.
        file: File index.
        offset: Offset of the first byte in the file's data section.
        num_bytes: Size in bytes.
        is_strided: Whether the shard is more than one run in the file.
        owner: Rank that holds the row in memory; of a shard its primary rank.
        writer: Rank that writes the row.
    """

    tensor: np.ndarray
    box: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    spec: np.ndarray = field(default_factory=_unset)
    table: np.ndarray = field(default_factory=_unset)
    slice_index: np.ndarray = field(default_factory=_unset)
    is_primary: np.ndarray = field(default_factory=_unset)
    is_shared: np.ndarray = field(default_factory=_unset)
    shard: np.ndarray = field(default_factory=_unset)
    replicas: np.ndarray = field(default_factory=_unset)
    file: np.ndarray = field(default_factory=_unset)
    offset: np.ndarray = field(default_factory=_unset)
    num_bytes: np.ndarray = field(default_factory=_unset)
    is_strided: np.ndarray = field(default_factory=_unset)
    owner: np.ndarray = field(default_factory=_unset)
    writer: np.ndarray = field(default_factory=_unset)

    def select(self, rows: np.ndarray) -> PlanTable:
        """Return these rows of all columns that are set."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        is_set = {name: len(column) == len(self.tensor) for name, column in columns.items()}
        return PlanTable(**{name: column[rows] if is_set[name] else column for name, column in columns.items()})


# Note [Plan table]: a row is a flat range `start` to `stop` of a box of a tensor. A plan is made of one table, of which
# each step selects or splits rows and sets further columns: the ranks' slices (`SliceTable`), the shards to write
# (`dedup_shards`), their places in the files (`place_in_files`), and the ranges with their writers (`balance_writes`).
# The indices in a table refer to lists that the step returns beside it: tensors, boxes, specs, sets of ranks.


def changes(*columns: np.ndarray) -> np.ndarray:
    """Return, per row, whether it differs from the previous row; True for the first row."""
    is_new = np.ones(len(columns[0]), dtype=bool)
    is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return is_new


_PRIMARY, _SHARED, _FULL = 1, 2, 4
_MAX_NUMEL = 2**63 - 1
_DIGIT_ZERO = ord("0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceTable:
    """Slices of one rank, in the rank's order.

    Attributes:
        names: Tensor name of each slice.
        specs: Distinct dtypes and shapes.
        boxes: Distinct boxes.
        rows: The slices; `tensor` is the index into `names`.
    """

    names: list[str]
    specs: list[TensorSpec]
    boxes: list[Box]
    rows: PlanTable

    @classmethod
    def from_slices(cls, slices: Sequence[TensorSlice]) -> SliceTable:
        """Build the table of these slices.

        Raises:
            CheckpointError: A tensor has no plain elements: it is sparse, quantized or on the meta device.
        """
        specs: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
        boxes: dict[Box, int] = {}
        for each in slices:
            tensor = each.tensor
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
                layout = "quantized" if tensor.is_quantized else str(tensor.layout)
                raise CheckpointError(
                    f"{each.name!r} is a {layout} tensor on {tensor.device}, without plain elements to write:"
                    " materialise it before saving"
                )
        rows = PlanTable(
            tensor=np.arange(len(slices)),
            box=_integers([boxes.setdefault(each.box, len(boxes)) for each in slices]),
            start=_integers([each.span[0] for each in slices]),
            stop=_integers([each.span[1] for each in slices]),
            spec=_integers([specs.setdefault((each.dtype, tuple(each.global_shape)), len(specs)) for each in slices]),
            is_primary=np.array([each.primary for each in slices], dtype=bool),
            is_shared=np.array([each.shared for each in slices], dtype=bool),
        )
        return cls(
            names=[each.name for each in slices],
            specs=[TensorSpec(shape=shape, dtype=dtype) for dtype, shape in specs],
            boxes=list(boxes),
            rows=rows,
        )

    def encode(self) -> bytes:
        """Serialize the table as compact JSON; equal tables give equal bytes.

        A slice that is a full tensor takes its name, the index of its dtype and shape, and one digit. Box and span
        follow from the shape, so the columns `box`, `start` and `stop` cover the other slices only.
        """
        rows, numbers = self.rows, {box: number for number, box in enumerate(self.boxes)}
        full = _integers([numbers.get(full_box(spec.shape), -1) for spec in self.specs])[rows.spec]
        numel = _numels(self.specs)[rows.spec]
        is_shard = ~((rows.box == full) & (rows.start == 0) & (rows.stop == numel))
        used, box_of = np.unique(rows.box[is_shard], return_inverse=True)
        flags = _PRIMARY * rows.is_primary + _SHARED * rows.is_shared + _FULL * ~is_shard
        columns = {
            "names": self.names,
            "specs": [[str(spec.dtype).removeprefix("torch."), spec.shape] for spec in self.specs],
            "spec": rows.spec.tolist(),
            "flags": (flags + _DIGIT_ZERO).astype(np.uint8).tobytes().decode("ascii"),
            "boxes": [self.boxes[number] for number in used.tolist()],
            "box": box_of.tolist(),
            "start": rows.start[is_shard].tolist(),
            "stop": rows.stop[is_shard].tolist(),
        }
        return json.dumps(columns, separators=(",", ":"), check_circular=False).encode("ascii")

    @classmethod
    def decode(cls, raw: bytes) -> SliceTable:
        """Parse the output of `encode`."""
        columns = json.loads(raw)
        specs = [TensorSpec(shape=tuple(shape), dtype=getattr(torch, dtype)) for dtype, shape in columns["specs"]]
        boxes: dict[Box, int] = {}
        stored_boxes = [tuple((offset, length) for offset, length in pairs) for pairs in columns["boxes"]]
        numbers = _integers([boxes.setdefault(box, len(boxes)) for box in stored_boxes])
        full = _integers([boxes.setdefault(full_box(spec.shape), len(boxes)) for spec in specs])
        flags = np.frombuffer(columns["flags"].encode("ascii"), dtype=np.uint8) - _DIGIT_ZERO
        is_shard, spec_of = flags & _FULL == 0, _integers(columns["spec"])
        box_of, starts = full[spec_of], np.zeros(len(spec_of), dtype=np.int64)
        stops = _numels(specs)[spec_of]
        box_of[is_shard] = numbers[_integers(columns["box"])]
        starts[is_shard], stops[is_shard] = columns["start"], columns["stop"]
        rows = PlanTable(
            tensor=np.arange(len(spec_of)),
            box=box_of,
            start=starts,
            stop=stops,
            spec=spec_of,
            is_primary=flags & _PRIMARY != 0,
            is_shared=flags & _SHARED != 0,
        )
        return cls(names=columns["names"], specs=specs, boxes=list(boxes), rows=rows)


def _numels(specs: Sequence[TensorSpec]) -> np.ndarray:
    # A shape beyond 64 bits is rejected later by the plan, where the tensor's name is known.
    numels: np.ndarray = _integers([min(math.prod(spec.shape), _MAX_NUMEL) for spec in specs])
    return numels
