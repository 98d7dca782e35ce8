"""Header of a safetensors file: encoding, and parsing with all rules of the format checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from booster.errors import CheckpointError
from booster.interface import TensorSpec

from .json import parse_json

HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
MAX_TENSORS = 1_000_000
_MAX_ELEMENTS = 2**56
_METADATA = "__metadata__"
_MEMBERS = {"dtype", "shape", "data_offsets"}

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """Byte range of a tensor, relative to the first byte after the header."""

    spec: TensorSpec
    start: int
    stop: int


def encode_header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], *, alignment: int = 8
) -> tuple[bytes, dict[str, TensorRange]]:
    """Return the first bytes of the file and, in file order, each tensor's byte range.

    Args:
        specs: Tensors.
        metadata: Metadata strings.
        alignment: Alignment of the data in bytes.

    Raises:
        CheckpointError: A name or dtype that safetensors does not support, or a header above the size limit.
    """
    ranges: dict[str, TensorRange] = {}
    document: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    stop = 0
    # The format forbids gaps; with wide dtypes first, every tensor is aligned nevertheless, so that it can be mapped.
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        if name == _METADATA:
            raise CheckpointError(f"a tensor is called {name!r}, which safetensors reserves: rename it")
        if spec.dtype not in _NAMES:
            raise CheckpointError(
                f"{name!r} is {spec.dtype}, which safetensors cannot hold: convert it, or save with"
                " use_safetensors=False"
            )
        start, stop = stop, stop + math.prod(spec.shape) * spec.dtype.itemsize
        ranges[name] = TensorRange(spec=spec, start=start, stop=stop)
        document[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, stop]}
    try:
        raw = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor's name is not valid Unicode ({error}): rename the parameter") from None
    raw += b" " * (-(HEADER_LENGTH_BYTES + len(raw)) % alignment)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(specs)} tensors need a header of {len(raw)} bytes, but safetensors allows {MAX_HEADER_BYTES}: save"
            " with shard=True and a smaller size_per_shard"
        )
    return len(raw).to_bytes(HEADER_LENGTH_BYTES, "little") + raw, ranges


def parse_header(raw: bytes, data_bytes: int, source_name: str) -> tuple[dict[str, TensorRange], dict[str, str]]:
    """Return each tensor's byte range, and the metadata.

    Args:
        raw: Header without its length field.
        data_bytes: Number of bytes that follow it in the file.
        source_name: File name for messages.

    Raises:
        CheckpointError: The header violates the format, or the file is truncated or longer than its tensors.
    """
    document = parse_json(raw, f"the header of {source_name}")
    if not isinstance(document, dict) or len(document) > MAX_TENSORS:
        raise _format_error(source_name, "its header is not an object of tensors, or has more than a million")
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _format_error(source_name, "its metadata is not an object of strings")
    ranges = {name: _parse_entry(name, entry, source_name) for name, entry in document.items()}
    offset = 0
    for tensor_range in sorted(ranges.values(), key=lambda part: (part.start, part.stop)):
        if tensor_range.start != offset:
            raise _format_error(source_name, f"its tensors overlap or leave a gap at byte {offset}")
        offset = tensor_range.stop
    if offset != data_bytes:
        raise _format_error(source_name, f"its tensors need {offset} bytes, but it has {data_bytes}")
    return ranges, metadata


def _parse_entry(name: str, entry: object, source_name: str) -> TensorRange:
    if not isinstance(entry, dict) or entry.keys() != _MEMBERS:
        raise _format_error(source_name, f"the entry of {name[:200]!r} is incomplete")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _format_error(source_name, f"shape or offsets of {name[:200]!r} are invalid")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _format_error(
            source_name, f"{name[:200]!r} has the dtype {str(entry['dtype'])[:40]!r}, which torch lacks"
        )
    numel = math.prod(shape)
    # torch multiplies the other sizes even with a zero
    if (numel or math.prod(size or 1 for size in shape)) >= _MAX_ELEMENTS:
        raise _format_error(source_name, f"{name[:200]!r} has the shape {shape}, which no tensor can have")
    start, stop = offsets
    if numel * dtype.itemsize != stop - start:
        raise _format_error(source_name, f"{name[:200]!r} does not fill its {stop - start} bytes")
    return TensorRange(spec=TensorSpec(shape=tuple(shape), dtype=dtype), start=start, stop=stop)


def _are_sizes(values: object) -> bool:
    if not isinstance(values, list) or len(values) > 64 or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 2**63)


def _format_error(source_name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source_name} is damaged or not a safetensors file: {reason}. Take another copy of it")


def to_contiguous_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor without gradient; shares memory if the tensor already is one."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
