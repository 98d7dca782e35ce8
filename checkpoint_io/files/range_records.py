"""Checksums of ranges: records, their compact JSON encoding, and the coverage check."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from booster.checkpoint_io.planning.byte_runs import Box, full_box
from booster.checkpoint_io.planning.tiling import CoverageLimitError, CoverageViolation, Tiles, check_coverage
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["RangeRecord", "check_ranges_cover", "decode_ranges", "encode_ranges"]

_CRC_DIGITS = 8
_MAX_NUMEL = 2**62
_FULL_TENSOR = -1
_COLUMNS = {"tensor", "names", "box", "boxes", "start", "stop", "crc32"}

# Note [Range columns]: columns instead of an object per range, so that a hundred thousand ranges take milliseconds.
# `names` are the distinct tensors and `tensor` the index into them per range; likewise `boxes` and `box`, with boxes as
# flat lists (offset, length, offset, length ...) and index -1 for the full tensor. All checksums are one string of
# eight digits each: in a single file the record is part of the header, and filling them in must not move the data.


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRecord:
    """Checksum of one range of a tensor.

    Attributes:
        name: Name of the tensor.
        box: Offset and length per dimension, or None for the full tensor.
        span: Flat range (start, stop) within the row-major flattening of the box.
        crc32: `zlib.crc32` of the elements' bytes in that order.
    """

    name: str
    box: Box | None
    span: tuple[int, int]
    crc32: int


def encode_ranges(ranges: Iterable[RangeRecord]) -> dict[str, Any]:
    """Encode ranges as JSON values; the length does not depend on the checksums. See Note [Range columns]."""
    ranges = list(ranges)
    names: dict[str, int] = {}
    boxes: dict[Box, int] = {}
    return {
        "tensor": [names.setdefault(each.name, len(names)) for each in ranges],
        "names": list(names),
        "box": [_FULL_TENSOR if each.box is None else boxes.setdefault(each.box, len(boxes)) for each in ranges],
        "boxes": [[number for pair in box for number in pair] for box in boxes],
        "start": [each.span[0] for each in ranges],
        "stop": [each.span[1] for each in ranges],
        "crc32": "".join(f"{each.crc32:08x}" for each in ranges),
    }


def decode_ranges(value: Any, source_name: str) -> tuple[RangeRecord, ...]:
    """Decode the output of `encode_ranges`.

    Args:
        value: Parsed JSON.
        source_name: File name for messages.

    Raises:
        CheckpointError: The value is malformed.
    """
    if not isinstance(value, dict) or set(value) != _COLUMNS or not _are_columns(**value):
        raise CheckpointError(
            f"{source_name} holds malformed checksums: it is damaged, or from a newer version. Take another copy of it"
        )
    boxes: list[Box | None] = [tuple(zip(box[::2], box[1::2], strict=True)) for box in value["boxes"]]
    boxes.append(None)  # at index -1
    crcs = np.frombuffer(bytes.fromhex(value["crc32"]), dtype=">u4").tolist()
    names = value["names"]
    return tuple(
        RangeRecord(name=names[tensor], box=boxes[box], span=(start, stop), crc32=crc)
        for tensor, box, start, stop, crc in zip(
            value["tensor"], value["box"], value["start"], value["stop"], crcs, strict=True
        )
    )


def check_ranges_cover(specs: Mapping[str, TensorSpec], ranges: Iterable[RangeRecord]) -> None:
    """Check that the ranges cover every element of every tensor exactly once.

    Args:
        specs: Tensors.
        ranges: Ranges of the tensors, in any order.

    Raises:
        CheckpointError: They do not, or a range belongs to no tensor or exceeds its tensor.
    """
    ranges = list(ranges)
    names = {name: number for number, name in enumerate(specs)}
    shapes = [spec.shape for spec in specs.values()]
    _check_shapes(specs)
    boxes: dict[Box, int] = {}
    full_boxes = [full_box(shape) for shape in shapes]
    tensor, box = [], []
    for each in ranges:
        number = names.get(each.name)
        if number is None:
            raise _mismatch_error(f"{each.name[:200]!r} has a checksum, but no file holds it")
        tensor.append(number)
        box.append(boxes.setdefault(full_boxes[number] if each.box is None else each.box, len(boxes)))
    tiles = Tiles(
        tensor=np.array(tensor, dtype=np.int64),
        box=np.array(box, dtype=np.int64),
        start=np.array([each.span[0] for each in ranges], dtype=np.int64),
        stop=np.array([each.span[1] for each in ranges], dtype=np.int64),
    )
    _check_bounds(list(specs), shapes, list(boxes), tiles)
    try:
        violation = check_coverage(shapes, list(boxes), tiles)
    except CoverageLimitError as error:
        raise _mismatch_error(f"{list(specs)[error.tensor][:200]!r} {error}") from None
    if violation is not None:
        raise _mismatch_error(_format_violation(list(specs), shapes, violation))


def _format_violation(names: Sequence[str], shapes: Sequence[tuple[int, ...]], violation: CoverageViolation) -> str:
    times = "no checksum" if violation.num_covers == 0 else "more than one checksum"
    return f"element {violation.index} of {names[violation.tensor][:200]!r}, of shape {shapes[violation.tensor]}, has {times}"


def _check_shapes(specs: Mapping[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        if math.prod(spec.shape) > _MAX_NUMEL:
            raise _mismatch_error(f"{name[:200]!r} has the shape {spec.shape}, which no file can hold")


def _check_bounds(names: Sequence[str], shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box], tiles: Tiles) -> None:
    for pair in np.unique(tiles.tensor * len(boxes) + tiles.box).tolist():
        shape, box = shapes[pair // len(boxes)], boxes[pair % len(boxes)]
        if not _is_within(box, shape):
            raise _mismatch_error(
                f"box {box} is out of bounds of {names[pair // len(boxes)][:200]!r}, of shape {shape}"
            )
    volumes = np.array([math.prod(length for _, length in box) for box in boxes], dtype=np.int64)
    wrong = np.flatnonzero((tiles.start < 0) | (tiles.start > tiles.stop) | (tiles.stop > volumes[tiles.box]))
    if len(wrong):
        first = wrong[0]
        raise _mismatch_error(
            f"elements {tiles.start[first]} to {tiles.stop[first]} are out of bounds of box"
            f" {boxes[tiles.box[first]]} of {names[tiles.tensor[first]][:200]!r}"
        )


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        low >= 0 and length >= 0 and low + length <= size for (low, length), size in zip(box, shape, strict=True)
    )


def _are_columns(*, tensor: Any, names: Any, box: Any, boxes: Any, start: Any, stop: Any, crc32: Any) -> bool:
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        return False
    if not isinstance(boxes, list) or not all(_are_integers(flat, 0, _MAX_NUMEL) for flat in boxes):
        return False
    return (
        all(len(flat) % 2 == 0 for flat in boxes)
        and _are_integers(tensor, 0, len(names))
        and _are_integers(box, _FULL_TENSOR, len(boxes))
        and _are_integers(start, 0, _MAX_NUMEL)
        and _are_integers(stop, 0, _MAX_NUMEL)
        and len(tensor) == len(box) == len(start) == len(stop)
        and isinstance(crc32, str)
        and len(crc32) == len(tensor) * _CRC_DIGITS
        and re.fullmatch("[0-9a-f]*", crc32) is not None
    )


def _are_integers(numbers: Any, low: int, stop: int) -> bool:
    """Return whether `numbers` is a list of integers in range(low, stop)."""
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return False
    return not numbers or (min(numbers) >= low and max(numbers) < stop)


def _mismatch_error(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the recorded checksums and the tensors do not match: {reason}. The checkpoint is damaged or mixed from"
        " different saves: take another copy of it"
    )
