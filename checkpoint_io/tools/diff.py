"""Differences between two checkpoints: names, shapes, dtypes, elements and plain values, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from booster.checkpoint_io.loading.fill import empty_slice, read_slices
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.interface import TensorSpec

BATCH_BYTES = 2**24  # per side and batch
CHUNK_ELEMENTS = 2**20  # converted to fp64 at a time
_WIDE_INTEGERS = (torch.int64, torch.uint64)  # fp64 cannot represent all of their values
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """Difference between the elements of one tensor.

    Attributes:
        num_elements: Number of elements.
        num_differing: Number of elements that differ by more than the tolerance.
        max_difference: Maximum absolute difference; infinity if only one side is NaN.
    """

    num_elements: int
    num_differing: int
    max_difference: float


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Differences between two sets of tensors.

    Attributes:
        num_common: Number of tensors in both.
        only_left: Names in the first only.
        only_right: Names in the second only.
        shapes: Both shapes by name, if different; the elements of such tensors are not compared.
        dtypes: Both dtypes by name, if different; elements are compared by value.
        elements: Element differences above the tolerance, by name.
        max_difference: Maximum absolute difference of all compared elements.
    """

    num_common: int = 0
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    elements: dict[str, ElementDifference] = field(default_factory=dict)
    max_difference: float = 0.0


def compare_tensors(left: StoredCheckpoint, right: StoredCheckpoint, *, tolerance: float = 0.0) -> Comparison:
    """Compare the tensors of two checkpoints, in 32 MiB of memory.

    Args:
        left: First checkpoint.
        right: Second checkpoint.
        tolerance: Absolute difference up to which elements are equal.

    Raises:
        CheckpointError: A file is damaged, or changes while it is read.
    """
    ours, theirs = left.specs, right.specs
    found = Comparison(
        only_left=[name for name in ours if name not in theirs],
        only_right=[name for name in theirs if name not in ours],
    )
    comparable: dict[str, TensorSpec] = {}
    for name in (name for name in ours if name in theirs):
        found.num_common += 1
        if ours[name].shape != theirs[name].shape:
            found.shapes[name] = ours[name].shape, theirs[name].shape
            continue
        if ours[name].dtype != theirs[name].dtype:
            found.dtypes[name] = ours[name].dtype, theirs[name].dtype
        comparable[name] = ours[name]
    totals: dict[str, ElementDifference] = {}
    for batch in _batches(comparable):
        chunks = zip(batch, _read(left, ours, batch), _read(right, theirs, batch), strict=True)
        for (name, _, _), first, second in chunks:
            totals[name] = _add(totals.get(name), compare_elements(first, second, tolerance=tolerance))
    found.elements = {name: total for name, total in totals.items() if total.num_differing > 0}
    found.max_difference = max((total.max_difference for total in totals.values()), default=0.0)
    return found


def compare_elements(left: torch.Tensor, right: torch.Tensor, *, tolerance: float = 0.0) -> ElementDifference:
    """Compare two tensors of one shape by value; dtypes may differ, and NaN equals NaN."""
    flat_left, flat_right = left.reshape(-1), right.reshape(-1)
    total = ElementDifference(num_elements=left.numel(), num_differing=0, max_difference=0.0)
    if _are_bitwise_equal(flat_left, flat_right):
        return total
    for start in range(0, left.numel(), CHUNK_ELEMENTS):
        first, second = (flat[start : start + CHUNK_ELEMENTS] for flat in (flat_left, flat_right))
        if not _are_bitwise_equal(first, second):
            difference = _differences(first, second)
            total = ElementDifference(
                num_elements=total.num_elements,
                num_differing=total.num_differing + int((difference > tolerance).sum()),
                max_difference=max(total.max_difference, float(difference.max())),
            )
    return total


def compare_values(left: Any, right: Any, value_name: str) -> Iterator[str]:
    """Yield one line for every difference between two plain values.

    Args:
        left: First value; containers are compared item by item.
        right: Second value.
        value_name: Name of the values, which begins every line.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            path = f"{value_name}.{key}" if value_name else str(key)
            if key not in left or key not in right:
                yield f"{path}: only in the {'second' if key in right else 'first'}"
            else:
                yield from compare_values(left[key], right[key], path)
        return
    if isinstance(left, (list, tuple)) and type(left) is type(right) and len(left) == len(right):
        for index, (first, second) in enumerate(zip(left, right, strict=True)):
            yield from compare_values(first, second, f"{value_name}[{index}]")
        return
    if not _are_equal_values(left, right):
        yield f"{value_name}: {_format_value(left)} != {_format_value(right)}"


def _batches(specs: Mapping[str, TensorSpec]) -> Iterator[list[tuple[str, int, int]]]:
    batch: list[tuple[str, int, int]] = []
    free_bytes = BATCH_BYTES
    for name, spec in specs.items():
        numel, start = math.prod(spec.shape), 0
        while start < numel:
            stop = min(numel, start + max(1, free_bytes // spec.dtype.itemsize))
            batch.append((name, start, stop))
            free_bytes -= (stop - start) * spec.dtype.itemsize
            start = stop
            if free_bytes < 16:  # less than one element of the widest dtype
                yield batch
                batch, free_bytes = [], BATCH_BYTES
    if batch:
        yield batch


def _read(
    stored: StoredCheckpoint, specs: Mapping[str, TensorSpec], batch: Iterable[tuple[str, int, int]]
) -> list[torch.Tensor]:
    chunks = [(name, empty_slice(name, specs[name], (start, stop))) for name, start, stop in batch]
    read_slices(stored, chunks)
    return [chunk.tensor for _, chunk in chunks]


def _add(total: ElementDifference | None, other: ElementDifference) -> ElementDifference:
    if total is None:
        return other
    return ElementDifference(
        num_elements=total.num_elements + other.num_elements,
        num_differing=total.num_differing + other.num_differing,
        max_difference=max(total.max_difference, other.max_difference),
    )


def _are_bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _differences(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    first, second = left.to(wide), right.to(wide)
    difference = (first - second).abs()
    difference[(first == second) | (first.isnan() & second.isnan())] = 0.0  # equal infinities too
    difference.nan_to_num_(nan=math.inf, posinf=math.inf)
    if left.dtype == right.dtype and left.dtype in _WIDE_INTEGERS:
        differs = left.view(torch.int64) != right.view(torch.int64)
        difference[differs] = difference[differs].clamp(min=1.0)
    return difference


def _are_equal_values(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor) or type(left) is not type(right):
        return False
    return bool(left == right) or (left != left and right != right)  # NaN equals NaN


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
