"""Manifest of a checkpoint: size and checksums of every file, range and document, and of itself."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from booster.checkpoint_io.planning.coverage import CoverageLimitError, check_coverage
from booster.checkpoint_io.planning.slices import Box, PlanTable, full_box
from booster.errors import CheckpointError
from booster.interface import TensorSpec

from .json import MAX_JSON_BYTES, parse_json

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
    for name, spec in specs.items():
        if math.prod(spec.shape) > _MAX_NUMEL:
            raise _mismatch_error(f"{name[:200]!r} has the shape {spec.shape}, which no file can hold")
    boxes: dict[Box, int] = {}
    full_boxes = [full_box(shape) for shape in shapes]
    tensor, box = [], []
    for each in ranges:
        number = names.get(each.name)
        if number is None:
            raise _mismatch_error(f"{each.name[:200]!r} has a checksum, but no file holds it")
        tensor.append(number)
        box.append(boxes.setdefault(full_boxes[number] if each.box is None else each.box, len(boxes)))
    tiles = PlanTable(
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
        times = "no checksum" if violation.num_covers == 0 else "more than one checksum"
        name, shape = list(specs)[violation.tensor][:200], shapes[violation.tensor]
        raise _mismatch_error(f"element {violation.index} of {name!r}, of shape {shape}, has {times}")


def _check_bounds(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box], tiles: PlanTable
) -> None:
    for pair in np.unique(tiles.tensor * len(boxes) + tiles.box).tolist():
        shape, box = shapes[pair // len(boxes)], boxes[pair % len(boxes)]
        is_within = len(box) == len(shape) and all(
            low >= 0 and length >= 0 and low + length <= size for (low, length), size in zip(box, shape, strict=True)
        )
        if not is_within:
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


R = TypeVar("R")

_FORMAT = "booster.manifest"
MANIFEST_KEY = "booster_manifest"  # in a tensor file's metadata: name of the manifest with its checksums
FORMAT_VERSION = 1
_MAX_NAME = 255  # limit of file systems per path component
# The last member is the checksum of all bytes before the comma that separates it.
_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}')
_CHECKSUM_BYTES = len(b',"crc32":"00000000"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Record of a tensor file.

    Attributes:
        num_bytes: Size of the file.
        head_bytes: Number of bytes before the data.
        head_crc32: Checksum of these bytes.
        ranges: Checksums of the data.
    """

    num_bytes: int
    head_bytes: int
    head_crc32: int
    ranges: tuple[RangeRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRecord:
    """Size and checksum of a file without tensors."""

    num_bytes: int
    crc32: int

    @classmethod
    def of(cls, raw: bytes) -> DocumentRecord:
        """Return the record of a file with this content."""
        return cls(num_bytes=len(raw), crc32=zlib.crc32(raw))

    def check(self, raw: bytes, path: object) -> None:
        """Raise `CheckpointError` if a file has another content."""
        if DocumentRecord.of(raw) != self:
            raise CheckpointError(
                f"{path} differs from its checksum: it is damaged, edited or from another save. Take another copy of"
                " the checkpoint"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        kind: Kind of checkpoint: "model", "optimizer" ...
        files: Tensor files by name.
        documents: Other files by name, in directories separated by "/".
        metadata: JSON metadata of the save, of at most six levels: plugin, world_size, versions, step ...
    """

    kind: str
    files: dict[str, FileRecord]
    documents: dict[str, DocumentRecord] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Serialize the manifest as JSON, with its own checksum last.

        Raises:
            CheckpointError: It could not be parsed again: a name is not valid Unicode, `metadata` are not JSON values,
                or it exceeds 64 MiB.
        """
        try:
            raw_facts = json.dumps({"facts": self.metadata}, allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the facts of a manifest are not JSON values: {error}") from None
        _check_facts(raw_facts)
        document = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "files": {
                name: {
                    "num_bytes": record.num_bytes,
                    "head_bytes": record.head_bytes,
                    "head_crc32": f"{record.head_crc32:08x}",
                    "ranges": encode_ranges(record.ranges),
                }
                for name, record in self.files.items()
            },
            "documents": {
                name: {"num_bytes": record.num_bytes, "crc32": f"{record.crc32:08x}"}
                for name, record in self.documents.items()
            },
            "facts": self.metadata,
        }
        try:
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")[:-1]
        except UnicodeEncodeError as error:
            raise CheckpointError(f"a tensor's name is not valid Unicode ({error}): rename the parameter") from None
        raw = body + b',"crc32":"%08x"}' % zlib.crc32(body)
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"the checksums of {len(self.files)} files take {len(raw)} bytes, but a manifest has at most"
                f" {MAX_JSON_BYTES}: save in fewer, larger files"
            )
        return raw

    @classmethod
    def parse(cls, raw: bytes, source_name: str) -> Manifest:
        """Parse the output of `encode`.

        Args:
            raw: Content of the file, untrusted.
            source_name: File name for messages.

        Raises:
            CheckpointError: Not a manifest, modified, or with names outside of the checkpoint's directory.
        """
        if len(raw) > MAX_JSON_BYTES:
            raise _format_error(source_name, f"it has {len(raw)} bytes, but a manifest has at most {MAX_JSON_BYTES}")
        body, checksum = raw[:-_CHECKSUM_BYTES], _CHECKSUM.fullmatch(raw[-_CHECKSUM_BYTES:])
        if checksum is None:
            raise _format_error(source_name, "it does not end with its own checksum")
        if zlib.crc32(body) != int(checksum[1], 16):
            raise _format_error(source_name, "its content and its own checksum do not match")
        document = parse_json(raw, source_name)
        if not isinstance(document, dict):
            raise _format_error(source_name, "it is not a JSON object")
        if document.get("format") != _FORMAT or type(document.get("version")) is not int:
            raise _format_error(source_name, "it is not a manifest of this library")
        if document["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{source_name} is of version {document['version']}, but this release reads {FORMAT_VERSION}: update"
                " torch-booster"
            )
        if set(document) != {"format", "version", "kind", "files", "documents", "facts", "crc32"}:
            raise _format_error(source_name, "members are missing or unknown")
        if not isinstance(document["kind"], str) or not isinstance(document["facts"], dict):
            raise _format_error(source_name, "kind or facts are of the wrong type")
        return cls(
            kind=document["kind"],
            files=_parse_table(document["files"], source_name, _parse_file, max_depth=1),
            documents=_parse_table(document["documents"], source_name, _parse_document),
            metadata=document["facts"],
        )


@lru_cache(maxsize=4)  # all parts of a save have the same facts, and so have most saves of a process
def _check_facts(raw: bytes) -> None:
    parse_json(raw, "what goes into the manifest as facts")


def _parse_table(
    value: Any, source_name: str, parse: Callable[[Any, str], R], max_depth: int | None = None
) -> dict[str, R]:
    if not isinstance(value, dict):
        raise _format_error(source_name, "files or documents are not a JSON object")
    for name in value:
        parts = name.split("/")
        if not all(map(is_safe_name, parts)) or len(parts) > (max_depth or len(parts)):
            raise CheckpointError(
                f"{source_name} names the file {name[:200]!r}: it may name only files in its own directory. Do not"
                " trust this checkpoint"
            )
    return {name: parse(record, f"{source_name}, in the record of {name},") for name, record in value.items()}


def is_safe_name(component: str) -> bool:
    """Return whether the path component is printable, not hidden, and has no special meaning on any system."""
    return (
        0 < len(component.encode("utf-8", "surrogatepass")) <= _MAX_NAME
        and not component.startswith(".")
        and all(character not in '/\\:*?"<>|' and character.isprintable() for character in component)
    )


def _parse_file(record: Any, source_name: str) -> FileRecord:
    if not isinstance(record, dict) or set(record) != {"num_bytes", "head_bytes", "head_crc32", "ranges"}:
        raise _format_error(source_name, "members are missing or unknown")
    num_bytes, head_bytes = _size(record["num_bytes"], source_name), _size(record["head_bytes"], source_name)
    if head_bytes > num_bytes:
        raise _format_error(source_name, f"{head_bytes} bytes of head do not fit into {num_bytes} bytes")
    return FileRecord(
        num_bytes=num_bytes,
        head_bytes=head_bytes,
        head_crc32=_crc32(record["head_crc32"], source_name),
        ranges=decode_ranges(record["ranges"], source_name),
    )


def _parse_document(record: Any, source_name: str) -> DocumentRecord:
    if not isinstance(record, dict) or set(record) != {"num_bytes", "crc32"}:
        raise _format_error(source_name, "members are missing or unknown")
    return DocumentRecord(num_bytes=_size(record["num_bytes"], source_name), crc32=_crc32(record["crc32"], source_name))


def _size(value: Any, source_name: str) -> int:
    if type(value) is not int or value < 0:
        raise _format_error(source_name, f"{str(value)[:40]!r} is not a size")
    return value


def _crc32(value: Any, source_name: str) -> int:
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{8}", value) is None:
        raise _format_error(source_name, f"{str(value)[:40]!r} is not a checksum")
    return int(value, 16)


def _format_error(source_name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source_name} is damaged or not a manifest: {reason}. Take another copy of the checkpoint")
